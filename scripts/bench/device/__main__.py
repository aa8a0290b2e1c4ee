"""Runs the benchmark."""

from scripts.bench.device.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
