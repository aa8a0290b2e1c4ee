"""Advice on parallel sizes for training a model: a search over configurations with the planner and its memory breakdown."""
