"""Bytes of plans: copies to the host, KV offload, and a breakdown of every byte."""
