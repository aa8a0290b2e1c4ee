"""Speed, memory and numbers on one GPU: `python -m scripts.bench.gpu`."""
