"""Runs the benchmark."""

from scripts.bench.between.bench import main

if __name__ == "__main__":
    main()
