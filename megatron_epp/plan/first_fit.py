"""Packing of whole sequences into rows, and chunks of these and of slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from megatron_epp.plan.chunk import Chunk, Segment


def first_fit(sequences: Iterable[int], lengths: Sequence[int], room: int, taken: Iterable[int] = ()) -> list[list[int]]:
    """Put each sequence into the first bin with room; one above `room` has a bin of its own.

    Returns the sequences of each bin of which `taken` says the tokens, then those of new bins.
    """
    left = [room - tokens for tokens in taken]
    held: list[list[int]] = [[] for _ in left]
    for q in sequences:
        at = next((at for at, free in enumerate(left) if lengths[q] <= free), None)
        if at is None:
            at = len(held)
            held.append([])
            left.append(room)
        held[at].append(q)
        left[at] -= lengths[q]
    return held


def joined(boundaries: Mapping[int, Sequence[int]], held: Iterable[Sequence[int]], lengths: Sequence[int]) -> tuple[Chunk, ...]:
    """Chunk table of slices, by the start and the ends of each slice of a sequence, and of whole sequences.

    `held` has those that follow the tail slice of each sliced sequence, then those of every batched chunk.
    """
    whole = (tuple(Segment(q, 0, lengths[q]) for q in sequences) for sequences in held)
    chunks: list[Chunk] = []
    for q, ends in boundaries.items():
        *parts, tail = ((Segment(q, start, end),) for start, end in pairwise(ends))
        chunks += [*map(Chunk, parts), Chunk(tail + next(whole))]
    return (*chunks, *map(Chunk, whole))


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Positions of the sequences by falling length; of equally long ones the first in the batch comes first."""
    return sorted(range(len(lengths)), key=lambda q: (-lengths[q], q))


def pack_whole(lengths: Sequence[int], room: int) -> tuple[Chunk, ...]:
    """Whole sequences in rows of at most `room` tokens: first fit, longest first. One that is longer has a row of its own."""
    return joined({}, first_fit(longest_first(lengths), lengths, room), lengths)
