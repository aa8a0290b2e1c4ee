"""Small chunks between the backwards of long sequences, to time loads from the host by."""

from __future__ import annotations

from megatron_epp.planner.order import LONG, slice_groups
from megatron_epp.schedule import Chunk

PACED = 4
"""Long sequences that get pacers."""


def with_pacers(chunks: tuple[Chunk, ...], count: int) -> tuple[tuple[Chunk, ...], frozenset[int]]:
    """Cut the last batched chunks in pieces and put some of the pieces behind each long sequence.

    A load starts as soon as the copies listed before it are done, and the only copy that waits for anything is an offload, for
    its forward. So while the backwards of a long sequence run, loads can be held back only by forwards in between. These
    are best small.

    Returns:
        The table, and which of its chunks the pieces are. No pieces where there is no long sequence or nothing to cut.
    """
    groups = slice_groups(chunks)
    long = [group for group in groups if len(group) >= LONG]
    batched = [group.start for group in groups if len(group) == 1]
    pieces: dict[int, list[Chunk]] = {}
    cut: set[int] = set()
    for group in sorted(long, key=lambda group: (-len(group), group.start))[:PACED]:
        while batched and len(chunks[batched[-1]].segments) < LONG:
            batched.pop()
        if not batched:
            break
        last = batched.pop()
        cut.add(last)
        segments = chunks[last].segments
        parts = min(count, len(segments))
        pieces[group.start] = [Chunk(segments[part::parts]) for part in range(parts)]
    table: list[Chunk] = []
    pacers: list[int] = []
    for group in groups:
        if group.start not in cut:
            table += chunks[group.start : group.stop]
        small = pieces.get(group.start, [])
        pacers += range(len(table), len(table) + len(small))
        table += small
    return tuple(table), frozenset(pacers)
