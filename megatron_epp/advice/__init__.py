"""Advice on parallel sizes for training a model: a search over layouts with the planner and the memory account."""
