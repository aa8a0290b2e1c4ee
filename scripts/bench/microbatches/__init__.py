"""Benchmark of uneven microbatches: plans against Megatron's own 1F1B."""
