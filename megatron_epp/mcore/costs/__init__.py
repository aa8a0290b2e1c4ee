"""Costs of the model to be trained: measured at start-up, from a profile, or from a file."""
