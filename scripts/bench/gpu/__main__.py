"""Runs the benchmark."""

from scripts.bench.gpu.bench import BENCH

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
