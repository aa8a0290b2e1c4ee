"""Measurements of layouts: `python -m scripts.bench.layouts`."""
