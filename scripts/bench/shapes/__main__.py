"""Runs the benchmark."""

from scripts.bench.shapes.bench import main

if __name__ == "__main__":
    main()
