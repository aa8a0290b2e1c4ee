"""Which parallel sizes to train a model with: layouts searched with the planner and the memory account."""
