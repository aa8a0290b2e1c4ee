"""Orders of actions, and what all of them are made from: groups of chunks, and the order of backwards.

Chunk tables are numbered in forward order: the slices of a sequence stand together, ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan import Action, Chunk, Op

Order = Sequence[Sequence[Action]]
"""The compute actions of every rank, in order: tuples, or numbers that stand for them (`kernels.codes.CodedOrder`)."""

CopyOrder = tuple[tuple[tuple[Action, Action | None], ...], ...]
"""Offloads and loads of every rank in order, each with the compute action it waits for besides its own forward or offload."""


def slice_groups(chunks: Sequence[Chunk]) -> list[range]:
    """Cut a table in forward order into runs that belong together: the slices of one sequence, or a single batched chunk."""
    starts = [c for c, chunk in enumerate(chunks) if chunk.segments[0].start == 0]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(chunks)], strict=True)]


def descending(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the chunks in the order of their backwards: group by group, the last slice of each first."""
    return [c for group in groups for c in reversed(group)]


def without_weights(order: Order) -> Order:
    """Return an order without its weight gradients (W)."""
    return tuple(tuple(action for action in row if action.op is not Op.W) for row in order)
