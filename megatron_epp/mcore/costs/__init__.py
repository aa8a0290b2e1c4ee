"""Costs of the model at hand: measured at start-up, from a profile, or from a file."""
