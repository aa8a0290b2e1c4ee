"""Compares training with plans against Megatron's own schedule: `python -m scripts.parity`."""
