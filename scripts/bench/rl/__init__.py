"""Plans for updates of reinforcement learning against the microbatches of RL frameworks, on paper."""
