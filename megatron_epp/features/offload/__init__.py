"""Offload: activations, and KV caches of slices, in host memory while a device does not need them."""
