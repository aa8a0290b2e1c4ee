"""Runs the comparison."""

from scripts.parity.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
