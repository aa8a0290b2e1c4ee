"""Megatron's training loop under plans: the session, the schedule function, reports and reduction."""
