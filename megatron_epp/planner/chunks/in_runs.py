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
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, Chunker

LOCKSTEP_WIDTHS = (4, 2, 3, 1, 6, 8)
"""Widths of the runs of sequences that take less than those. Wide runs fill better, and keep keys and values of more chunks."""
_SPARE_SHARE = 0.15
"""Share of a chunk's time by which all chunks of a long sequence together may exceed theirs before it gets one more."""
_LONG_SHARE = 0.05
"""Share by which a sequence must take longer than the widest run to get a run of its own."""


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


class _Split(NamedTuple):
    """Division of a run over its columns, which will be chunks.

    Attributes:
        longest_us: time of the column that takes longest.
        pieces: of every sequence that is cut, the time in each of its columns, which no other's are in.
        whole: sequences that every column has besides.
    """

    longest_us: float
    pieces: dict[int, dict[int, float]]
    whole: list[list[int]]


def _cut(chunker: Chunker, run: Sequence[tuple[float, int]], width: int) -> list[Chunk]:
    """Return the chunks of a run; fewer than its width where there is too little to cut.

    Args:
        run: time and number of its sequences, the one that takes longest first.
    """
    lengths, times_us = chunker.problem.lengths, {q: time_us for time_us, q in run}
    falling = [*times_us]
    if not falling or width == 1:
        return [Chunk(tuple(Segment(q, 0, lengths[q]) for q in falling))] * bool(falling)
    chunk_us = sum(times_us.values()) / width
    most = min(width - 1, max(1, sum(time_us > chunk_us for time_us in times_us.values())))
    splits = (_split(falling, times_us, width, num_cut) for num_cut in range(1, most + 1))
    split = min(splits, key=lambda split: split.longest_us)
    chunks, used = list[Chunk](), set[int]()
    for q, pieces in split.pieces.items():
        begin, until_us = 0, 0.0
        for number in sorted(pieces):
            until_us += pieces[number]
            end = lengths[q] if number == max(pieces) else chunker.cut_near(q, until_us)
            if end > begin:
                chunks.append(Chunk((Segment(q, begin, end), *(Segment(w, 0, lengths[w]) for w in split.whole[number]))))
                used.add(number)
                begin = end
    rest = (split.whole[number] for number in range(width) if number not in used)
    return chunks + [Chunk(tuple(Segment(q, 0, lengths[q]) for q in whole)) for whole in rest if whole]


def _split(falling: Sequence[int], times_us: Mapping[int, float], width: int, num_cut: int) -> _Split:
    """Divide a run, cutting so many of its sequences: each over as many columns as it fills, the last over all that are left.

    Whole sequences fill up the columns, and then every cut one levels its own.
    """
    chunk_us, start = sum(times_us.values()) / width, 0
    columns, own = list[tuple[float, int]](), dict[int, range]()
    for number, q in enumerate(falling[:num_cut]):
        is_last = number == num_cut - 1
        fills = width if is_last else max(1, math.ceil(times_us[q] / chunk_us - _SPARE_SHARE))
        own[q] = range(start, min(width, start + fills))
        columns += [(0.0 if is_last else times_us[q] / len(own[q]), at) for at in own[q]]
        start = own[q].stop
    heapq.heapify(columns)
    whole: list[list[int]] = [[] for _ in range(width)]
    loads_us = [0.0] * width
    for q in (*falling[num_cut:], *(q for q, of in own.items() if not of)):
        load_us, number = columns[0]
        whole[number].append(q)
        loads_us[number] += times_us[q]
        heapq.heapreplace(columns, (load_us + times_us[q], number))
    pieces = {q: _level(sorted((loads_us[at], at) for at in of), times_us[q]) for q, of in own.items() if of}
    levels = (loads_us[at] + time_us for of in pieces.values() for at, time_us in of.items())
    return _Split(max(*levels, *loads_us), pieces, whole)


def _level(columns: Sequence[tuple[float, int]], time_us: float) -> dict[int, float]:
    """Return the parts of a time that level the columns that have least, by their numbers.

    Args:
        columns: time and number of each, the least first.
    """
    total_us = time_us
    for count, (load_us, _) in enumerate(columns, start=1):
        total_us += load_us
        if count == len(columns) or total_us / count <= columns[count][0]:
            break
    return {number: total_us / count - load_us for load_us, number in columns[:count]}
