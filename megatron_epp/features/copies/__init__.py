"""Copies to the host: the choice of activations, and of keys and values of slices, that a plan copies there."""
