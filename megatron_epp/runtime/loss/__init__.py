"""Cross entropy by blocks of tokens."""
