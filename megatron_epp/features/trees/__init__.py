"""Shared prefixes: tokens that several sequences begin with run once, and all of them read their keys and values."""
