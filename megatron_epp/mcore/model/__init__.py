"""Megatron's models under plans: stages, attention, losses, recompute, and weight gradients of their own."""
