"""Core attention of chunks: segments, slices behind a prefix, the KV cache of sliced sequences, context parallelism."""
