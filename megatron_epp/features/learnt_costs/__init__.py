"""Costs that a run learns from its first iterations, and keeps with its checkpoints."""
