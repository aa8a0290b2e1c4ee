"""Runs the soak."""

from scripts.soak.soak import main

if __name__ == "__main__":
    raise SystemExit(main())
