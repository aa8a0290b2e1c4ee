"""Prefixes that the samples of a batch share: what each borrows, found from its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of

LEAST_TOKENS = 32
"""Fewest tokens that a sample borrows. Not measured: a segment more in a chunk is worth some of them."""
_NOBODY = -1


def shared_prefixes(
    tokens: Sequence[NDArray[np.int64]], trained: Sequence[NDArray[np.bool_]], least: int = LEAST_TOKENS
) -> tuple[Borrowed, ...]:
    """Return what the inputs of every sample borrow; empty if none share enough.

    In the order of their tokens, a sample shares most with the one before it. Of two that begin with the same ``n + 1`` tokens,
    the first ``n`` inputs have the same labels, too. A label is trained for one sample at most: what a second one trains, it
    does not borrow.

    Args:
        tokens: of every sample, one more than it has inputs, none below zero.
        trained: of every sample, which labels are trained, one for each input.
    """
    order = sorted(range(len(tokens)), key=lambda q: (np.asarray(tokens[q], dtype=">i4").tobytes(), q))
    borrowed = [NOTHING_BORROWED] * len(tokens)
    trains = [np.where(mask, q, _NOBODY) for q, mask in enumerate(trained)]  # of every label, the sample that trains it
    for before, q in pairwise(order):
        most = min(_shared(tokens[before], tokens[q]) - 1, len(trained[q]) - 1)
        most = _trained_once(before, most, trained[q], trains, borrowed)
        if most < least:
            continue
        path = path_of(before, most, borrowed)
        borrowed[q] = Borrowed(path[-1].sequence, most)
        for holder, start, end in path:
            trains[holder][start:end][trained[q][start:end]] = q
    return tuple(borrowed) if any(count for _, count in borrowed) else ()


def _shared(before: NDArray[np.int64], behind: NDArray[np.int64]) -> int:
    size = min(len(before), len(behind))
    differs = np.flatnonzero(before[:size] != behind[:size])
    return int(differs[0]) if len(differs) else size


def _trained_once(
    lender: int, most: int, trained: NDArray[np.bool_], trains: Sequence[NDArray[np.int64]], borrowed: Sequence[Borrowed]
) -> int:
    for holder, start, end in path_of(lender, most, borrowed):
        twice = np.flatnonzero(trained[start:end] & (trains[holder][start:end] != _NOBODY))
        if len(twice):
            return start + int(twice[0])
    return most
