"""Execution of plans: a rank's actions, its messages, and the memory they hold. Needs torch, not Megatron."""
