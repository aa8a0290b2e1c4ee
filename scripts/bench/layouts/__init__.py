"""What the layout of a model is worth: `python -m scripts.bench.layouts`."""
