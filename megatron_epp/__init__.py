"""Elastic pipeline parallelism for Megatron-LM: plan every iteration from the lengths in the batch, prove the plan, run it."""

__version__ = "0.1.0"
