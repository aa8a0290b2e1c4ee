"""Demonstration: updates of GRPO by verl's own engine, with Megatron's schedule and with plans, and in slices under a cap."""
