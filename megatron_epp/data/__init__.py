"""Sequences, batches, and the order in which runs take them. Needs numpy, not Megatron."""
