"""Losses of the user's in slices: of the trained tokens of samples, which chunks may cut, by a head of logits or of values."""
