"""Functions of Megatron that are replaced, known by fingerprint."""
