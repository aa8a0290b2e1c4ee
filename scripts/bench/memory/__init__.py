"""Recompute and offload under caps: `python -m scripts.bench.memory`."""
