"""Measurement of the balance between replicas: `python -m scripts.bench.balance`."""
