"""Kernel plans that libraries build for the shapes of random plans: `python -m scripts.bench.shapes`."""
