"""Runs the benchmark."""

from scripts.bench.models.bench import main

if __name__ == "__main__":
    main()
