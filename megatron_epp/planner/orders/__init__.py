"""Orders of actions: 1F1B with a warm-up window, list scheduling, and weight gradients split off."""
