"""Chunks of trees: a branch that takes long has slices of its own, so that its backwards can follow its forwards at once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.planner.chunks.chunker import Chunker

_NEAR_SHARE = 0.02
"""Share of a chunk's time by which a cut moves to the end of a sequence."""


def depth_first(sequences: Sequence[int], borrowed: Sequence[Borrowed]) -> tuple[int, ...]:
    """Order sequences so that each comes behind the one it borrows from, those that borrow most of it first."""
    borrowers: dict[int, list[int]] = {}
    for q in sequences:
        borrowers.setdefault(borrowed[q].sequence, []).append(q)
    waiting, order = borrowers.get(-1, [])[::-1], list[int]()
    while waiting:
        order.append(waiting.pop())
        waiting += sorted(borrowers.get(order[-1], ()), key=lambda q: borrowed[q].tokens)
    return tuple(order)


def cut_trees(chunker: Chunker, sequences: Sequence[int], shares: Sequence[float], least: int) -> list[Chunk]:
    """Return the chunks of a run, which have about these shares of its time; a cut leaves `least` tokens on either side.

    A sequence that is cut ends its last chunk. Its slices take equally long, with the first in the rest of the chunk before it,
    so a branch waits for no other's backwards, and keys and values of as few as possible are alive.
    """
    first_token, lengths = chunker.problem.first_token, chunker.problem.lengths
    unit_us = sum(map(chunker.own_us, sequences)) / sum(shares)
    chunks, parts = list[Chunk](), list[Segment]()
    room_us, room = unit_us * shares[0], chunker.token_cap
    for q in depth_first(sequences, chunker.problem.borrowed):
        begin, own_us = first_token(q), chunker.own_us(q)
        whole_us = room_us + max(0, round((own_us - room_us) / unit_us)) * unit_us
        stretch = own_us / whole_us
        while begin < lengths[q]:
            end, took_us = lengths[q], own_us if begin == first_token(q) else chunker.part_us(q, begin, lengths[q])
            if took_us > room_us * stretch + _NEAR_SHARE * unit_us:
                end = chunker.cut_near(q, begin, room_us * stretch)
                if min(end - begin, lengths[q] - end) < least:
                    end = begin if parts else chunker.cut_within(q, begin, begin + least)
            if end - begin > room:
                end = begin if parts else chunker.cut_within(q, begin, begin + room)
            if end > begin:
                parts.append(Segment(q, begin, end))
                took_us = took_us if end == lengths[q] else chunker.part_us(q, begin, end)
                room_us, room = room_us - took_us, room - (end - begin)
            is_cut = end < lengths[q] or begin > first_token(q)
            begin = end
            if is_cut or room_us <= _NEAR_SHARE * unit_us:
                chunks.append(Chunk(tuple(parts)))
                parts, room = [], chunker.token_cap
                room_us = unit_us * shares[min(len(chunks), len(shares) - 1)]
    return [*chunks, Chunk(tuple(parts))] if parts else chunks
