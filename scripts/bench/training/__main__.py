"""Runs the benchmark."""

from scripts.bench.training.bench import main

if __name__ == "__main__":
    main()
