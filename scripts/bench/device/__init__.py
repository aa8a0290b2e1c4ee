"""What one GPU shows with torch alone: see `bench.py`."""
