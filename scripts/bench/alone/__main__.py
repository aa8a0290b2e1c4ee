"""Runs the benchmark."""

from scripts.bench.alone.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
