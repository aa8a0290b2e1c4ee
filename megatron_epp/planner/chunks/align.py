"""Chunk tables of lockstep replicas: equally many chunks in each, and the k-th of all about equally long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from megatron_epp.cost import causal_pairs
from megatron_epp.cost.work import span_work_of
from megatron_epp.plan import Chunk
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.order import as_slices, has_groups, slice_groups, stand_in
from megatron_epp.planner.spans import allowed_cuts

Unit = tuple[Chunk, ...]
"""Chunks that follow each other: the slices of one sequence, or a single batched chunk."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Tables of replicas with equally many chunks.

    Attributes:
        chunks: the table of every replica.
        runs: sizes of the runs that all tables can be cut into without parting the slices of a sequence, or sequences with one
            loss; empty for one replica, where the table has them.
    """

    chunks: tuple[tuple[Chunk, ...], ...]
    runs: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks[0])

    def stand_in(self, loss_groups: Sequence[int]) -> tuple[Chunk, ...]:
        """Return the table from which orders of all replicas are made; `loss_groups` are those of one replica's problem."""
        return as_slices(self.runs) if self.runs else stand_in(self.chunks[0], loss_groups)


def align(tables: Sequence[tuple[Chunk, ...]], chunkers: Sequence[Chunker]) -> Aligned | None:
    """Cut shorter tables finer until all have as many chunks, and lay long sequences side by side. One table stays as it is.

    Returns:
        None where a replica has too few tokens for so many chunks.
    """
    if len(tables) == 1:
        return Aligned((tables[0],))
    groups = [chunker.problem.loss_groups for chunker in chunkers]
    units = [
        [table[run.start : run.stop] for run in slice_groups(table, own)] for table, own in zip(tables, groups, strict=True)
    ]
    most = max(map(len, tables))
    for own, chunker in zip(units, chunkers, strict=True):
        times_us = [[_cut_time_us(chunk, chunker) for chunk in unit] for unit in own]
        for _ in range(sum(map(len, own)), most):
            if not _cut_longest(own, times_us, chunker):
                return None
    chunks = _side_by_side(units)
    starts = ({run.start for run in slice_groups(*pair)} for pair in zip(chunks, groups, strict=True))
    return Aligned(chunks, tuple(stop - start for start, stop in pairwise([*sorted(set.intersection(*starts)), most])))


def _side_by_side(units: list[list[Unit]]) -> tuple[tuple[Chunk, ...], ...]:
    """Slices first, sequences with most of them ahead; where one replica's sequence has fewer, batched chunks follow them."""
    long = [sorted((unit for unit in own if len(unit) > 1), key=len, reverse=True) for own in units]
    single = [[unit[0] for unit in own if len(unit) == 1] for own in units]
    tables: list[list[Chunk]] = [[] for _ in units]
    for units_of_each in zip_longest(*long, fillvalue=()):
        width = max(map(len, units_of_each))
        for table, slices, rest in zip(tables, units_of_each, single, strict=True):
            table += slices
            table += rest[: width - len(slices)]
            del rest[: width - len(slices)]
    return tuple((*table, *rest) for table, rest in zip(tables, single, strict=True))


def _cut_longest(units: list[Unit], times_us: list[list[float]], chunker: Chunker) -> bool:
    """Cut the chunk that takes longest among chunks that can be cut; False when none can.

    Args:
        times_us: of every chunk by `_cut_time_us`, computed once: there may be a thousand chunks, and as many cuts.
    """
    longest_us = max(map(max, times_us))
    if longest_us < 0:
        return False
    unit = next(unit for unit, times in enumerate(times_us) if longest_us in times)
    at = times_us[unit].index(longest_us)
    parts, separate = _cut(units[unit][at], len(units[unit]) == 1, chunker)
    units[unit] = (*units[unit][:at], *parts, *units[unit][at + 1 :])
    times_us[unit][at : at + 1] = [_cut_time_us(part, chunker) for part in parts]
    units += [(chunk,) for chunk in separate]
    times_us += [[_cut_time_us(chunk, chunker)] for chunk in separate]
    return True


def _cut(chunk: Chunk, is_alone: bool, chunker: Chunker) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Cut a chunk in two; return the parts that stay in its unit, and what is a unit of its own."""
    first, *rest = chunk.segments
    if not rest:
        middle = _middle(chunk, chunker)
        return (Chunk((first._replace(end=middle),)), Chunk((first._replace(start=middle),))), ()
    if has_groups(chunker.problem.loss_groups):  # what has one loss stays together
        return (Chunk((first,)), Chunk(tuple(rest))), ()
    if not is_alone:  # the whole sequences of a tail slice get a chunk of their own
        return (Chunk((first,)),), (Chunk(tuple(rest)),)
    return (Chunk((first, *rest[1::2])),), (Chunk(tuple(rest[::2])),)


def _cut_time_us(chunk: Chunk, chunker: Chunker) -> float:
    """Return the time of a chunk, negative for one that cannot be cut."""
    return _time_us(chunk, chunker) if len(chunk.segments) > 1 or _middle(chunk, chunker) else -1.0


def _middle(chunk: Chunk, chunker: Chunker) -> int:
    """Token at which to cut a chunk's only segment, a multiple of the padding from its start; 0 if there is none outside of
    spans.
    """
    sequence, start, end = chunk.segments[0]
    multiple, spans = chunker.problem.token_multiple, chunker.problem.spans
    middle = start + max(multiple, (end - start) // 2 // multiple * multiple)
    if middle >= end or not spans or not spans[sequence]:
        return middle if middle < end else 0
    inside = [int(cut) for cut in allowed_cuts(end, spans[sequence], multiple) if start < cut < end]
    return min(inside, key=lambda cut: abs(cut - middle), default=0)


def _time_us(chunk: Chunk, chunker: Chunker) -> float:
    pairs = sum(causal_pairs(start, end) for _, start, end in chunk.segments)
    time_us = chunker.line.time_us(chunk.num_tokens, pairs, sum(start for _, start, _ in chunk.segments))
    spans = chunker.problem.spans
    return time_us + chunker.span_us * span_work_of(chunk, spans) if spans else time_us
