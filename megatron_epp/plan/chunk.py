"""Chunks, the unit of work of one forward or backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of one sequence. With ``start > 0`` they attend to the sequence's earlier tokens too."""

    sequence: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Borrowed(NamedTuple):
    """First tokens of a sequence that another one of the batch begins with, too: they are in that one's chunks alone.

    `tokens` is more than that one borrows itself, so every token is borrowed from the sequence that holds it, or from one that
    goes on borrowing.
    """

    sequence: int
    tokens: int


NOTHING_BORROWED = Borrowed(-1, 0)


def path_of(sequence: int, end: int, borrowed: Sequence[Borrowed]) -> list[Segment]:
    """Return where the first `end` tokens of a sequence are, from its first: parts of the sequences that hold them."""
    path: list[Segment] = []
    while end > 0:
        lender, first = borrowed[sequence] if borrowed else NOTHING_BORROWED
        if first < end:
            path.insert(0, Segment(sequence, first, end))
        sequence, end = lender, min(first, end)
    return path


@dataclass(frozen=True, slots=True)
class Chunk:
    """An ordered list of segments that run together (InfiniPipe, section III).

    It is *batched*, whole short sequences; *split*, one slice of a long sequence; or *hybrid*, a slice plus whole short ones. A
    slice is the first segment, so that the keys and values of its prefix lie in front of the rest in one buffer. Behind the end
    of a long sequence another one may begin, which goes on in the next chunk.
    """

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(segment.end - segment.start for segment in self.segments)

    def padded_tokens(self, multiple: int) -> int:
        """Tokens after padding to a multiple (what tensor, sequence and context parallelism need), which is never empty."""
        return max(1, -(-self.num_tokens // multiple)) * multiple

    def slice_of(self, lengths: Sequence[int]) -> Segment | None:
        """Return the first of the segments that is part of a longer sequence, given the tokens of every sequence."""
        for segment in self.segments:
            if segment.start > 0 or segment.end < lengths[segment.sequence]:
                return segment
        return None

    def begun_of(self, lengths: Sequence[int]) -> Segment | None:
        """Return the last segment if it begins a longer sequence behind the end of another one."""
        for last in self.segments[1:][-1:]:
            if self.segments[0].start > 0 and last.start == 0 and last.end < lengths[last.sequence]:
                return last
        return None

    def kind(self, lengths: Sequence[int]) -> str:
        """Kind of the chunk: ``batched``, ``split`` or ``hybrid``."""
        if self.slice_of(lengths) is None:
            return "batched"
        return "split" if len(self.segments) == 1 else "hybrid"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Chunks that hold the token just before a segment of each chunk, and the reverse."""

    previous: tuple[tuple[int, ...], ...]
    following: tuple[tuple[int, ...], ...]


def slice_neighbours(chunks: Sequence[Chunk], borrowed: Sequence[Borrowed] = ()) -> Neighbours:
    """Link every segment to the chunk with the token before it, of its sequence or of the one that it borrows from.

    Segments without that token in any chunk get no link; `check` reports them.
    """
    held: dict[int, list[tuple[int, int, int]]] = {}
    for c, chunk in enumerate(chunks):
        for sequence, start, end in chunk.segments:
            held.setdefault(sequence, []).append((start, end, c))
    for parts in held.values():
        parts.sort()
    previous: list[dict[int, None]] = [{} for _ in chunks]
    following: list[dict[int, None]] = [{} for _ in chunks]
    for c, chunk in enumerate(chunks):
        for sequence, start, _ in chunk.segments:
            if start <= 0:
                continue
            parts = held.get(path_of(sequence, start, borrowed)[-1].sequence if borrowed else sequence, [])
            at = bisect_right(parts, start - 1, key=itemgetter(0)) - 1
            if at >= 0 and parts[at][1] >= start and (before := parts[at][2]) != c:
                previous[c][before] = None
                following[before][c] = None
    return Neighbours(tuple(map(tuple, previous)), tuple(map(tuple, following)))
