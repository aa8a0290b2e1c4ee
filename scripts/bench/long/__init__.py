"""The longest sequence that fits: `python -m scripts.bench.long`."""
