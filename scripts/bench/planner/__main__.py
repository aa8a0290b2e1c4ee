"""Runs the benchmark."""

from scripts.bench.planner.bench import main

if __name__ == "__main__":
    main()
