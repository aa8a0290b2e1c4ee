"""Training speed against Megatron's 1F1B: `python -m scripts.bench.training`."""
