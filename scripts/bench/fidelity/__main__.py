"""Runs the benchmark."""

from scripts.bench.fidelity.bench import main

if __name__ == "__main__":
    main()
