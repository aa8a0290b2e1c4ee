"""Plans under memory caps: recompute, offload, KV offload, and a breakdown of every byte."""
