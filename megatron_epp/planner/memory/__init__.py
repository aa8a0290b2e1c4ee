"""Plans under memory caps: recompute, offload, KV offload, and the account of every byte."""
