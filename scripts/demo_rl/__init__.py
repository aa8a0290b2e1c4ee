"""Demonstration: steps of GRPO by verl's own engine, with Megatron's schedule and with plans."""
