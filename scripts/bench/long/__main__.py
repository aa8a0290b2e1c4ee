"""Runs the benchmark."""

from scripts.bench.long.bench import main

if __name__ == "__main__":
    main()
