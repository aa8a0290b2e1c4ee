"""Transformer Engine's own Python on a CPU, with its compiled extension replaced by `extension`."""
