"""Orders of actions: 1F1B with a warm-up window, parts of patterns, and what completes an order."""
