"""Chunks, the unit of work of one forward or backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of one sequence. With ``start > 0`` they attend to the sequence's earlier tokens too."""

    sequence: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


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
        """Tokens after padding to a multiple (what tensor, sequence and context parallelism need)."""
        return -(-self.num_tokens // multiple) * multiple

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
    """Chunks that hold what is just before each chunk's first segment, and just after the segment that goes on, or None."""

    previous: tuple[int | None, ...]
    following: tuple[int | None, ...]


def slice_neighbours(chunks: Sequence[Chunk]) -> Neighbours:
    """Link the slices of each sequence in token order. Segments that are not adjacent get no link; `check` reports them."""
    starts = {(s.sequence, s.start): c for c, chunk in enumerate(chunks) for s in chunk.segments}
    previous: list[int | None] = [None] * len(chunks)
    following: list[int | None] = [None] * len(chunks)
    for c, chunk in enumerate(chunks):
        for segment in chunk.segments:
            after = starts.get((segment.sequence, segment.end))
            if after is not None and after != c:
                following[c] = after
                previous[after] = c
    return Neighbours(tuple(previous), tuple(following))
