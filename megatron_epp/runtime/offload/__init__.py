"""Activations in host memory between forward and backward."""
