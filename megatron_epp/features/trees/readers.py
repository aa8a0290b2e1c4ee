"""Readers of segments: those whose queries read their keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.chunk import Borrowed, path_of


def readers_of(chunks: Sequence[Chunk], borrowed: Sequence[Borrowed]) -> tuple[Counter[Segment], dict[Segment, int]]:
    """Count the segments whose queries read each segment's tokens, and say in which chunk the last of them is."""
    held: dict[int, list[Segment]] = {}
    for segment in sorted(segment for chunk in chunks for segment in chunk.segments):
        held.setdefault(segment.sequence, []).append(segment)
    readers, last = Counter[Segment](), dict[Segment, int]()
    for c, chunk in enumerate(chunks):
        for sequence, start, _ in chunk.segments:
            for part, _ in ahead_of(sequence, start, held, borrowed):
                readers[part] += 1
                last[part] = c
    return readers, last


def ahead_of(
    sequence: int, start: int, held: Mapping[int, Sequence[Segment]], borrowed: Sequence[Borrowed]
) -> Iterator[tuple[Segment, int]]:
    """Yield the segments with a sequence's tokens up to `start`, and up to which token of each; `held` are all, ascending."""
    for holder, first, stop in path_of(sequence, start, borrowed):
        yield from ((part, min(part.end, stop)) for part in held.get(holder, ()) if part.start < stop and part.end > first)
