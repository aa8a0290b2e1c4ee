"""Makespans of plans of many stages, measured on one GPU: `python -m scripts.bench.alone`."""
