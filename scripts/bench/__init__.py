"""Benchmarks, a folder for each: `python -m scripts.bench.NAME`."""
