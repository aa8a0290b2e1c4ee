"""Predicted against measured times and bytes: `python -m scripts.bench.fidelity`."""
