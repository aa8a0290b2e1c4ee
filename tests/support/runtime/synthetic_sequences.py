"""Sequences held in memory, for tests of the data path."""

from dataclasses import replace

import numpy as np

from tests.support.plan.small_plans import chunk, make_plan


class MemoryDataset:
    """Token t of sequence i is ``1000 * i + t``, so that every token tells where it came from.

    `masks` has by sequence which of its tokens are trained; all are of a sequence without.
    """

    def __init__(self, lengths, dtype=np.uint16, masks=None):
        self.lengths = np.asarray(lengths)
        self._dtype = dtype
        self._masks = masks or {}

    def __len__(self):
        return len(self.lengths)

    def tokens(self, index, start=0, end=None):
        return (1000 * index + np.arange(self.lengths[index] + 1))[start:end].astype(self._dtype)

    def trained(self, index, start, end):
        return self._masks[index][start:end] if index in self._masks else None


def plan_of(lengths, chunks, token_multiple=1):
    """A plan of forwards of these chunks and nothing else of interest; `chunks` are lists of (sequence, start, end)."""
    table, rows = [chunk(*segments) for segments in chunks], [" ".join(f"0F{c}" for c in range(len(chunks)))]
    plan = make_plan(rows, table, cap_bytes=1, static_bytes=0, forward_only=True)
    return replace(plan, lengths=tuple(lengths), token_multiple=token_multiple)
