"""Runs the benchmark."""

from scripts.bench.orders.bench import main

if __name__ == "__main__":
    main()
