"""Positions at which sequences go on from a state: a layer that hands one on has it at the ends of what it runs at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.chunk import Borrowed, path_of

if TYPE_CHECKING:
    from megatron_epp.runtime.handover import Cut  # a planner imports no torch


class Part(NamedTuple):
    """Tokens of a chunk that run at once, with the cuts ahead of them and behind them at which states are handed on."""

    tokens: Segment
    before: Cut | None
    behind: Cut | None


def cut_chunks(chunks: Sequence[Chunk], borrowed: Sequence[Borrowed]) -> tuple[list[list[Part]], Counter[Cut]]:
    """Return every chunk's segments, cut where others go on, and for each cut how many chunks besides its own go on there."""

    def before(part: Segment) -> Cut | None:
        return (path_of(part.sequence, part.start, borrowed)[-1].sequence, part.start) if part.start else None

    going_on = [{cut for part in chunk.segments if (cut := before(part)) is not None} for chunk in chunks]
    readers, tokens = Counter(cut for own in going_on for cut in own), dict[int, list[int]]()
    for sequence, token in sorted(readers):
        tokens.setdefault(sequence, []).append(token)
    table = list[list[Part]]()
    for chunk, own in zip(chunks, going_on, strict=True):
        table.append([])
        for sequence, start, end in chunk.segments:
            cut = before(Segment(sequence, start, end))
            for stop in (token for token in tokens.get(sequence, ()) if start < token <= end):
                behind = sequence, stop
                table[-1].append(Part(Segment(sequence, start, stop), cut, behind))
                readers[behind] -= behind in own
                start, cut = stop, behind
            if start < end:
                table[-1].append(Part(Segment(sequence, start, end), cut, None))
    return table, readers
