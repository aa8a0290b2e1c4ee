"""Rows that several segments of a chunk read: those for which one attention call serves the queries of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_epp.plan import Segment

type Reads = Mapping[Segment, tuple[tuple[Segment, int], ...]]
"""Result of `readers.reads_of`: for each segment, those that it reads, and up to which token."""

LEAST_ROWS = 2048
"""Fewest rows that must be gathered less for a call more to be worth it. Not measured: of 8 heads of 128 channels they take
about as long on an H100 as the launches of the call and of its merging.
"""
ROWS_PER_TOKEN = 2.0
"""Fewest of these rows for each token whose output is merged. On a CPU 2 rows are 6 % or more of a layer's time, half a row is
nothing or a loss (`python -m scripts.bench.prefixes`). By the bytes that both move on a GPU, 0.6 rows pay where every query
head has keys of its own, and 2 where 8 share them.
"""


class CommonRows(NamedTuple):
    """Tokens ``[start, stop)`` of the prefixes of some segments of a chunk, which are the same in all of them.

    At level 0 they begin with the prefixes, at others where those of the level above end.
    """

    level: int
    members: tuple[int, ...]  # positions of the segments in the chunk
    start: int
    stop: int

    @property
    def saved(self) -> int:
        return (len(self.members) - 1) * (self.stop - self.start)


def common_rows(segments: Sequence[Segment], reads: Reads) -> tuple[CommonRows, ...]:
    """Return what segments of a chunk have in common, by level, where that is worth a call."""
    return tuple(sorted(_below(segments, reads, tuple(range(len(segments))), 0, 0, 0))) if len(segments) > 1 else ()


def _below(
    segments: Sequence[Segment], reads: Reads, members: tuple[int, ...], start: int, shared: int, level: int
) -> Iterator[CommonRows]:
    """Yield what of `members` have in common beyond token `shared`, all of which have it in common up to there."""
    branches: dict[Segment, list[int]] = {}
    for member in members:
        following = (part for part, stop in reads[segments[member]] if stop > shared)
        if (part := next(following, None)) is not None:
            branches.setdefault(part, []).append(member)
    for same in branches.values():
        if len(same) > 1:
            first, *others = (reads[segments[member]] for member in same)
            stop = min(_length_in_common(first, other) for other in others)
            rows = CommonRows(level, tuple(same), start, stop)
            if rows.saved >= max(LEAST_ROWS, ROWS_PER_TOKEN * sum(segments[member].num_tokens for member in same)):
                yield rows
                yield from _below(segments, reads, rows.members, stop, stop, level + 1)
            else:
                yield from _below(segments, reads, rows.members, start, stop, level)


def _length_in_common(first: Sequence[tuple[Segment, int]], other: Sequence[tuple[Segment, int]]) -> int:
    length = 0
    for (part, stop), (its_part, its_stop) in zip(first, other, strict=False):
        if part != its_part:
            break
        length = min(stop, its_stop)
        if stop != its_stop:
            break
    return length
