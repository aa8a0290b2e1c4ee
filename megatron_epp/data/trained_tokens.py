"""Counts of trained tokens: of the sequences of a batch, for plans, and of documents and what truncation leaves of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_epp.data.indexed_documents import Index, Mask
from megatron_epp.plan.problem import TrainedParts

if TYPE_CHECKING:  # which needs torch
    from megatron_epp.data.batch import SequenceDataset

PARTS = 16
"""Most parts of a sequence that are counted by themselves, since an answer may be in its last slices only."""


_BLOCK_TOKENS = 1 << 20
"""Tokens of documents whose mask is read at once, unless one document has more."""


class TrainedLabels(NamedTuple):
    """Numbers of trained labels of some documents: all, and the part that truncation removes."""

    total: int
    cut: int


def trained_labels(
    read: Callable[[int, int], Mask], first: int, num_tokens: Index, limit: int | None = None
) -> Iterator[TrainedLabels]:
    """Yield the trained labels of consecutive documents of these tokens each, truncated to `limit` positions, for blocks of
    them.

    Args:
        read: returns the mask of tokens from one to before another of a pair.
        first: number of the pair's tokens before the first document.
    """
    ends = np.cumsum(num_tokens, dtype=np.int64)
    document = 0
    while document < len(ends):
        start = int(ends[document - 1]) if document else 0
        after = max(document + 1, int(np.searchsorted(ends, start + _BLOCK_TOKENS, side="right")))
        mask = read(first + start, first + int(ends[after - 1]))
        lengths = num_tokens[document:after]
        begins = ends[document:after] - lengths - start
        total = int(mask.sum(dtype=np.int64)) - int(mask[begins[lengths > 0]].sum(dtype=np.int64))
        long = np.flatnonzero(lengths > limit + 1) if limit is not None else ()
        cut = sum(int(mask[begins[at] + limit + 1 : begins[at] + lengths[at]].sum(dtype=np.int64)) for at in long)
        yield TrainedLabels(total, cut)
        document = after


def any_trained(dataset: SequenceDataset, indices: Sequence[int]) -> bool:
    """Return True if some token of sequences is trained; their masks are read up to the first that has one."""
    for index in indices:
        mask = dataset.trained(index, 1, int(dataset.lengths[index]) + 1)
        if mask is None or mask.any():
            return True
    return False


def trained_parts(dataset: SequenceDataset, indices: Sequence[int]) -> tuple[TrainedParts, ...]:
    """Return the trained tokens of sequences, each in equal parts; empty if all their tokens are trained."""
    counts = tuple(_counted(dataset, index) for index in indices)
    total = sum(int(dataset.lengths[index]) for index in indices)
    return counts if sum(map(sum, counts)) < total else ()


def _counted(dataset: SequenceDataset, index: int) -> TrainedParts:
    length = int(dataset.lengths[index])
    mask = dataset.trained(index, 1, length + 1)
    if mask is None:
        return (length,)
    count = min(PARTS, length)
    edges = [length * part // count for part in range(count + 1)]
    return tuple(int(mask[start:end].sum(dtype=np.int64)) for start, end in pairwise(edges))
