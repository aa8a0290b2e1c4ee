"""Shared prefixes of a caller's whole microbatches: they run once, and forward steps and losses get the rows of all tokens."""
