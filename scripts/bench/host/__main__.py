"""Runs the benchmark."""

from scripts.bench.host.bench import main

if __name__ == "__main__":
    main()
