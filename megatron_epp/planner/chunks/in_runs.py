"""Chunk tables of runs: whole sequences in a number of neighbouring chunks that take equally long.

That number is the run's width. Width 1 is a packed chunk, and a long sequence by itself is its slices. Of several sequences
those that take longer than a chunk are cut, each over chunks of its own, so that they level what the others fill.

Widths are common to all replicas of a lockstep group, so that the k-th chunks of all take equally long, and one order serves
them all. With tables cut for each replica by itself and laid side by side the group took 8.6 % longer than its slowest replica
alone at the median of 21 batches, 39 % at worst; with runs 4.0 and 12.5 % (`scripts.bench.lockstep`). One pipeline has runs of
width 1, which leave no small chunk over: an update of 82 sequences on two ranks is 7 % faster, larger batches are as fast.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, Chunker

LOCKSTEP_WIDTHS = (4, 2, 3, 1, 6, 8)
"""Widths of the runs of sequences that take less than those. Wide runs fill better, and keep keys and values of more chunks."""
_SPARE_SHARE = 0.15
"""Share of a chunk's time by which all chunks of a long sequence together may exceed theirs before it gets one more."""
_LONG_SHARE = 0.05
"""Share by which a sequence must take longer than the widest run to get a run of its own."""
_NEAR_SHARE, _LEAST_TOKENS = 0.02, 32
"""Share of a chunk's time by which a cut moves to the end of a sequence, and least tokens of a sequence on a side of a cut."""


def cut_in_runs(chunkers: Sequence[Chunker], num_chunks: float, widest: int) -> Aligned | None:
    """Cut the batches of all replicas into about so many chunks each.

    Args:
        widest: width of the runs of sequences that do not take longer; the last run may have less.

    Returns:
        None where a replica has too few sequences or tokens for as many runs and chunks.
    """
    falling = [_falling(chunker) for chunker in chunkers]
    chunk_us = max(chunker.total_us for chunker in chunkers) / num_chunks
    long_us = (1 + _LONG_SHARE) * widest * chunk_us
    long = [[time_us for time_us, _ in own if time_us > long_us] for own in falling]
    widths = [math.ceil(max(side_by_side) / chunk_us - _SPARE_SHARE) for side_by_side in zip_longest(*long, fillvalue=chunk_us)]
    full, rest = divmod(max(0 if widths else 1, round(num_chunks) - sum(widths)), widest)
    widths += [widest] * full + [rest] * (rest > 0)
    if sum(widths) > MOST_CHUNKS:
        return None
    tables = [tuple(_table(*of)) for of in zip(chunkers, falling, map(len, long), [widths] * len(falling), strict=True)]
    return Aligned(tuple(tables), tuple(widths)) if all(len(table) == sum(widths) for table in tables) else None


def _falling(chunker: Chunker) -> list[tuple[float, int]]:
    """Return the time and number of every sequence, the one that takes longest first."""
    times_us = (chunker.part_us(q, 0, length) for q, length in enumerate(chunker.problem.lengths))
    return sorted(((time_us, q) for q, time_us in enumerate(times_us)), key=lambda each: (-each[0], each[1]))


def _table(chunker: Chunker, falling: Sequence[tuple[float, int]], num_long: int, widths: Sequence[int]) -> Iterator[Chunk]:
    """Yield the chunks of one replica, up to the first run that cannot be cut.

    Long sequences have the first runs. Each other one, the longest first, goes into the run that takes least time per chunk
    then.
    """
    runs: list[list[tuple[float, int]]] = [[] for _ in widths]
    loads: dict[int, list[tuple[float, int]]] = {}
    for number, width in enumerate(widths):
        own = falling[number : number + 1] if number < num_long else []
        runs[number] += own
        heapq.heappush(loads.setdefault(width, []), (sum(time_us for time_us, _ in own), number))
    for time_us, q in falling[num_long:]:
        width = min(loads, key=lambda width: ((loads[width][0][0] + time_us) / width, loads[width][0][1]))
        load_us, number = loads[width][0]
        runs[number].append((time_us, q))
        heapq.heapreplace(loads[width], (load_us + time_us, number))
    for run, width in zip(runs, widths, strict=True):
        chunks = _cut(chunker, run, width)
        if len(chunks) < width:
            return
        yield from chunks


def _cut(chunker: Chunker, run: Sequence[tuple[float, int]], width: int) -> list[Chunk]:
    """Return the chunks of a run; fewer than its width where there is too little to cut.

    Its sequences are one stream, cut where a chunk has taken its share of the time: where one ends inside of a chunk the next
    one begins there.

    Args:
        run: time and number of its sequences, the one that takes longest first.
    """
    lengths, chunk_us = chunker.problem.lengths, sum(time_us for time_us, _ in run) / width
    least = chunker.problem.token_multiple * -(-_LEAST_TOKENS // chunker.problem.token_multiple)
    chunks, parts, room_us = list[Chunk](), list[Segment](), chunk_us
    for time_us, q in run:
        begin = 0
        while begin < lengths[q]:
            rest_us = chunker.part_us(q, begin, lengths[q]) if begin else time_us
            end = lengths[q]
            if len(chunks) < width - 1 and rest_us > (1 + _NEAR_SHARE) * room_us:
                end = chunker.cut_near(q, time_us - rest_us + max(0.0, room_us))
                if min(end - begin, lengths[q] - end) < least:  # too little of the sequence on one side of the cut
                    end = begin if parts else min(begin + least, lengths[q])
            if end > begin:
                parts.append(Segment(q, begin, end))
                room_us -= rest_us if end == lengths[q] else room_us
                begin = end
            if len(chunks) < width - 1 and (begin < lengths[q] or room_us <= _NEAR_SHARE * chunk_us):
                chunks.append(_chunk_of(parts, lengths))
                parts, room_us = [], chunk_us
    return [*chunks, _chunk_of(parts, lengths)] if parts else chunks


def _chunk_of(parts: Sequence[Segment], lengths: Sequence[int]) -> Chunk:
    """Return a chunk of neighbouring parts of a stream; one that goes on comes first if no sequence ends in front of it."""
    *others, last = parts
    if last.end < lengths[last.sequence] and parts[0].start == 0:
        return Chunk((last, *others))
    return Chunk(tuple(parts))
