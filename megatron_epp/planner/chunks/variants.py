"""Chunk tables that no grain makes: of whole sequences only, and in another order."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan import Chunk
from megatron_epp.planner.chunks.chunker import whole_sequences
from megatron_epp.planner.order import arranged, slice_groups
from megatron_epp.planner.problem import Problem


def by_length(problem: Problem) -> list[tuple[Chunk, ...]]:
    """Return two tables of whole sequences, one per chunk: longest first, and shortest first."""
    lengths, chunks = problem.lengths, whole_sequences(problem.lengths)
    rising = tuple(chunks[q] for q in sorted(range(len(lengths)), key=lambda q: (lengths[q], q)))
    return [arranged(table, problem.loss_groups) for table in (rising[::-1], rising)]


def started(chunks: Sequence[Chunk], num_ranks: int, loss_groups: Sequence[int] = ()) -> tuple[tuple[Chunk, ...], ...]:
    """Return the same chunks with other sequences before the longest: some of one chunk each, or the next longest.

    Args:
        chunks: the chunk table, longest sequence first.
        num_ranks: ranks of the pipeline; a pipeline is full with about as many chunks.
    """
    groups = [tuple(chunks[c] for c in run) for run in slice_groups(chunks, loss_groups)]
    single = [group for group in groups if len(group) == 1]
    first, second = single[:num_ranks], list[tuple[Chunk, ...]]()
    for group in groups[1:]:
        if sum(map(len, second)) >= 2 * num_ranks:
            break
        second.insert(0, group)
    single_first = [*first, *(group for group in groups if len(group) > 1), *single[num_ranks:]]
    second_first = [*second, *groups[:1], *groups[len(second) + 1 :]]
    return tuple(tuple(chunk for group in order for chunk in group) for order in (single_first, second_first))
