"""Elastic pipeline parallelism for Megatron-LM: plan each iteration from the lengths in its batch, prove it, run it."""

__version__ = "0.2.0"
