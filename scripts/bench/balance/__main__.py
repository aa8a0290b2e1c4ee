"""Runs the benchmark."""

from scripts.bench.balance.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
