"""Runs the benchmark."""

from scripts.bench.orders.orders import BENCH

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
