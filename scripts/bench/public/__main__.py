"""Runs the comparison."""

from scripts.bench.public.bench import main

if __name__ == "__main__":
    main()
