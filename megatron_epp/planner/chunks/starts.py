"""Chunk tables that begin with other sequences than the longest."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan import Chunk
from megatron_epp.planner.orders.warm_up import slice_groups


def started(chunks: Sequence[Chunk], num_ranks: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return the same chunks with others before those of the longest sequence: some of one chunk each, or the next longest.

    Args:
        chunks: the chunk table, longest sequence first.
        num_ranks: ranks of the pipeline; a pipeline is full with about as many chunks.
    """
    groups = [tuple(chunks[c] for c in group) for group in slice_groups(chunks)]
    single = [group for group in groups if len(group) == 1]
    first, second = single[:num_ranks], list[tuple[Chunk, ...]]()
    for group in groups[1:]:
        if sum(map(len, second)) >= 2 * num_ranks:
            break
        second.insert(0, group)
    single_first = [*first, *(group for group in groups if len(group) > 1), *single[num_ranks:]]
    second_first = [*second, *groups[:1], *groups[len(second) + 1 :]]
    return tuple(tuple(chunk for group in order for chunk in group) for order in (single_first, second_first))
