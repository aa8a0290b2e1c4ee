"""How evenly replicas are loaded: `python -m scripts.bench.balance`."""
