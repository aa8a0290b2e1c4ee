"""Counts of the trained tokens of sequences, by which plans know how many pass the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from megatron_epp.cost.work import TrainedParts

if TYPE_CHECKING:  # which needs torch
    from megatron_epp.data.batch import SequenceDataset

PARTS = 16
"""Most parts of a sequence that are counted by themselves, since an answer may be in its last slices only."""


def trained_parts(dataset: SequenceDataset, indices: Sequence[int]) -> tuple[TrainedParts, ...]:
    """Return the trained tokens of sequences, each in equal parts; empty if all their tokens are trained.

    Args:
        dataset: of the sequences, whose masks are read.
        indices: of the sequences in it.
    """
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
