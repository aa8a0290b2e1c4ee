"""Prefixes that the samples of a batch share: what each borrows, found from its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of

LEAST_TOKENS = 32
"""Fewest tokens that a sample borrows. Not measured: a segment more in a chunk is worth some of them."""


def shared_prefixes(
    tokens: Sequence[NDArray[np.int64]], first_trained: Sequence[int], least: int = LEAST_TOKENS
) -> tuple[Borrowed, ...]:
    """Return what the inputs of every sample borrow; empty if none share enough.

    In the order of their tokens, a sample shares most with the one before it. Of two that begin with the same ``n + 1`` tokens,
    the first ``n`` inputs have the same labels, too. A sample borrows no input whose label it trains, so that each label is
    trained for the sample that has it.

    Args:
        tokens: of every sample, one more than it has inputs, none below zero.
        first_trained: of every sample, the first input whose label is trained; the number of inputs if none is.
    """
    order = sorted(range(len(tokens)), key=lambda q: (np.asarray(tokens[q], dtype=">i4").tobytes(), q))
    borrowed = [NOTHING_BORROWED] * len(tokens)
    for before, q in pairwise(order):
        most = min(num_shared(tokens[before], tokens[q]) - 1, len(tokens[q]) - 2, first_trained[q])
        if most >= least:
            borrowed[q] = Borrowed(path_of(before, most, borrowed)[-1].sequence, most)
    return tuple(borrowed) if any(count for _, count in borrowed) else ()


def num_shared(before: NDArray[np.int64], behind: NDArray[np.int64]) -> int:
    """Return how many tokens both begin with."""
    size = min(len(before), len(behind))
    differs = np.flatnonzero(before[:size] != behind[:size])
    return int(differs[0]) if len(differs) else size
