"""Core attention of chunks: segments, slices with a prefix, the KV cache of sliced sequences, context parallelism."""
