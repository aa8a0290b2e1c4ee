"""Runs the benchmark."""

from scripts.bench.host.bench import BENCH

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
