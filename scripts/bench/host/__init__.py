"""Counts what one action makes the host do."""
