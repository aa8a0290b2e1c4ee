"""Runs the benchmark."""

from scripts.bench.memory.bench import main

if __name__ == "__main__":
    main()
