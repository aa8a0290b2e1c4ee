"""Batches of uneven microbatches, drawn once from quantiles of Wikipedia's lengths and not chosen for their results."""

from __future__ import annotations

from megatron_epp.data.sequence_lengths import wikipedia

LONGEST, SHORTEST = 1024, 16
"""Tokens of a microbatch of the trained batches: longer ones are cut, shorter ones padded."""


def batch(seed: int, count: int, longest: int = LONGEST, shortest: int = SHORTEST) -> tuple[int, ...]:
    """Draw the tokens of each microbatch of a batch."""
    return tuple(int(length) for length in wikipedia(count, seed).clip(shortest, longest))
