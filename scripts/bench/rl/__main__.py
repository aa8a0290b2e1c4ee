"""Runs the benchmark."""

from scripts.bench.rl.bench import main

if __name__ == "__main__":
    main()
