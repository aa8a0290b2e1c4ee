"""Runs the benchmark."""

from scripts.bench.exact.bench import main

if __name__ == "__main__":
    main()
