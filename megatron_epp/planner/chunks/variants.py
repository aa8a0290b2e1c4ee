"""Chunk tables that no grain makes: with the longest sequences whole, of whole sequences only, and in another order.

A slice's keys and values stay, with their gradients, until the first slice of its sequence has run backward. With a whole
sequence that recomputes they live as long as one layer does. So where a cap is too small for the caches of a sequence's slices,
the sequence may fit whole, at the price that all ranks wait for one long chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.chunks.chunker import Chunker, longest_first, whole_sequences
from megatron_epp.planner.order import arranged, slice_groups
from megatron_epp.planner.problem import Problem

MOST_WHOLE = 3
"""Longest sequences that are tried whole together. Not measured: each takes a table for each of `CHUNKS_PER_STAGE`, and is
tried only where nothing sliced fits.
"""
CHUNKS_PER_STAGE = (2, 4, 8, 16)
"""Chunks per rank that are tried for the sequences that stay sliced."""


def tables_with_whole(problem: Problem, costs: Costs, chunk_tokens: int | None) -> Iterator[tuple[Chunk, ...]]:
    """Yield tables in which the longest sequences run whole, and the others are sliced and packed as in other tables.

    The whole ones come last, or in the middle of the batched chunks: earlier chunks keep the ranks busy while the first passes.

    Args:
        problem: the batch and its padding.
        costs: time of a stage, by which work is balanced.
        chunk_tokens: most padded tokens of a chunk; None for no limit.
    """
    lengths = problem.lengths
    falling = longest_first(lengths)
    if chunk_tokens is not None and max(lengths) > chunk_tokens:
        return
    for count in range(1, min(MOST_WHOLE, len(lengths) - 1) + 1):
        whole, others = falling[:count], falling[count:]
        alone = tuple(Chunk((Segment(q, 0, lengths[q]),)) for q in whole)
        chunker = Chunker.of(problem.part(others), costs, chunk_tokens)
        for share in CHUNKS_PER_STAGE:
            rest = _renumbered(chunker.table(chunker.grain(chunks=problem.num_ranks * share)), others)
            batched = [run.start for run in slice_groups(rest) if len(run) == 1]
            middle = batched[len(batched) // 2] if batched else len(rest)
            yield arranged(rest + alone, problem.loss_groups)
            yield arranged(rest[:middle] + alone + rest[middle:], problem.loss_groups)


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
        loss_groups: as in `Problem`.
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


def _renumbered(chunks: tuple[Chunk, ...], sequences: Sequence[int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(tuple(Segment(sequences[q], start, end) for q, start, end in chunk.segments)) for chunk in chunks)
