"""Segments with the keys and values that each segment's queries read besides its own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.chunk import Borrowed, path_of


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
