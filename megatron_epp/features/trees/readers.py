"""Readers of keys and values: what each segment's queries read besides its own, and the order in which backwards follow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_epp.plan import Chunk, Plan, Segment
from megatron_epp.plan.chunk import Borrowed, path_of, slice_neighbours
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.order import Groups, has_groups, slice_groups


def reads_of(chunks: Sequence[Chunk], borrowed: Sequence[Borrowed]) -> dict[Segment, tuple[tuple[Segment, int], ...]]:
    """Return, for each segment in the order of the table, those with the tokens before its own, and up to which of each it
    reads.
    """
    segments, held = [segment for chunk in chunks for segment in chunk.segments], dict[int, list[Segment]]()
    for segment in sorted(segments):
        held.setdefault(segment.sequence, []).append(segment)
    return {
        segment: tuple(
            (part, min(part.end, stop))
            for holder, first, stop in path_of(segment.sequence, segment.start, borrowed)
            for part in held.get(holder, ())
            if part.start < stop and part.end > first
        )
        for segment in segments
    }


def groups_of(chunks: Sequence[Chunk], batch: Plan | Problem) -> Groups:
    """Return a table's chunks in groups in the order of their backwards, the last chunk of each first.

    A group has the chunks that one chunk is the last to read, so a branch's backwards follow its forwards at once, and what all
    branches read comes behind the last of them. Where losses are computed together, all forwards of a run come first.
    """
    if bool(batch.loss_groups) if isinstance(batch, Plan) else has_groups(batch.loss_groups):
        return slice_groups(chunks)
    return _branches(tuple(chunks), batch.borrowed)


@lru_cache(maxsize=64)  # rules order a table again and again
def _branches(chunks: tuple[Chunk, ...], borrowed: tuple[Borrowed, ...]) -> Groups:
    following, last = slice_neighbours(chunks, borrowed).following, [*range(len(chunks))]
    for c in reversed(range(len(chunks))):
        last[c] = max((last[reader] for reader in following[c]), default=c)
    groups: dict[int, list[int]] = {}
    for c, reader in enumerate(last):
        groups.setdefault(reader, []).append(c)
    return [groups[reader] for reader in sorted(groups)]
