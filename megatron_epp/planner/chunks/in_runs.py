"""Chunk tables of runs: whole sequences, one behind the other, cut into chunks by time.

The number of a run's chunks is its width. Width 1 is a packed chunk, and a long sequence by itself is its slices; of several
sequences, those are cut in which a chunk ends. Forwards of a run come in order, its backwards in reverse.

Chunks take equally long, but for those at the ends of a table: a pipeline fills and empties sooner with small chunks, and has
less overhead with large ones between. On 12 batches of 16 and 32 sequences, on 4 and 8 stages, that gained 2.1 % on average.

Widths are common to all replicas of a lockstep group, so that one order serves them all: the group takes 2.9 % longer than its
slowest replica alone at the median of 21 batches (`scripts.bench.lockstep`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest
from typing import NamedTuple

import numpy as np

from megatron_epp.features import batch_target
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, Chunker, round_up
from megatron_epp.planner.order import as_slices, stand_in


@dataclass(frozen=True, slots=True)
class Aligned:
    """Tables of replicas with equally many chunks.

    `runs` are sizes of the runs that all tables can be cut into without parting the slices of a sequence, or sequences with one
    loss; empty for one replica, where the table has them.
    """

    chunks: tuple[tuple[Chunk, ...], ...]
    runs: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks[0])

    def stand_in(self, loss_groups: Sequence[int]) -> tuple[Chunk, ...]:
        """Return the table from which orders of all replicas are made; `loss_groups` are those of one replica's problem."""
        return as_slices(self.runs) if self.runs else stand_in(self.chunks[0], loss_groups)


class Ends(NamedTuple):
    """Smaller chunks at the ends of a table: those that grow at the beginning and shrink at the end, in multiples of the ranks,
    and the share of a chunk's time that the first and the last have.
    """

    rising: float = 0.0
    falling: float = 0.0
    least: float = 1.0


EVEN, SMALL_ENDS = Ends(), Ends(0.5, 2.0, 0.3)


class Shape(NamedTuple):
    """Shape of a table of runs: width of the runs of sequences that do not take longer. Unless it `is_free`, the sequence that
    takes longest has a whole number of chunks.
    """

    widest: int
    ends: Ends = EVEN
    is_free: bool = False

    def __str__(self) -> str:
        return f"runs of {self.widest}" + ", small ends" * (self.ends != EVEN) + ", free" * self.is_free


SHAPES = Shape(1, SMALL_ENDS), Shape(4, SMALL_ENDS), Shape(1), Shape(1, is_free=True)
"""With one stage per rank. Wide runs fill better, and keep keys and values of more chunks."""
SHAPES_OF_SEVERAL = Shape(1), Shape(1, SMALL_ENDS), Shape(4), Shape(4, SMALL_ENDS), Shape(2)
"""With several stages per rank, which fill sooner."""
LOCKSTEP_SHAPES = (
    *(Shape(4), Shape(2), Shape(3), Shape(1), Shape(6), Shape(8)),
    *(Shape(1, SMALL_ENDS), Shape(4, SMALL_ENDS), Shape(MOST_CHUNKS)),
)
"""The last is one run of all sequences, which can be cut as finely as any other replica's."""
SLICED_SHAPES = Shape(1), Shape(1, SMALL_ENDS)
"""Where the number of slices is given."""
_SPARE_SHARE = 0.15
"""Share of a chunk's time by which all chunks of a long sequence together may exceed theirs before it gets one more."""
_LONG_SHARE = 0.05
"""Share by which a sequence must take longer than the widest run to get a run of its own."""
_ROUNDS = 4
"""Times that runs of replicas are cut until they have equally many chunks."""
_NEAR_SHARE, _LEAST_TOKENS = 0.02, 32
"""Share of a chunk's time by which a cut moves to the end of a sequence, and least tokens of a sequence on a side of a cut."""

Timed = tuple[float, tuple[int, ...]]
"""Time and numbers of sequences that stay in one run: one, or those with one loss."""


def cut_in_runs(
    chunkers: Sequence[Chunker],
    falling: Sequence[Sequence[Timed]],
    num_chunks: float,
    shape: Shape,
    least_tokens: int = _LEAST_TOKENS,
    streams: bool = False,
) -> Aligned | None:
    """Cut the batches of all replicas, `falling` (`falling_times`), into about so many chunks if none were smaller than others.

    A cut leaves `least_tokens` of a sequence on either side. If keys and values `streams` from the host, slices have at most
    twice their mean tokens: those of equal time are uneven in tokens, and so in memory. None where there would be too many, or
    one of several replicas has too little for as many as another.
    """
    chunk_us = max(chunker.total_us for chunker in chunkers) / num_chunks
    longest_us = max(own[0][0] for own in falling)
    if longest_us > chunk_us and not shape.is_free:
        whole_us = longest_us / math.ceil(longest_us / chunk_us - _SPARE_SHARE)
        num_chunks, chunk_us = num_chunks * chunk_us / whole_us, whole_us
    long_us = (1 + _LONG_SHARE) * shape.widest * chunk_us
    long = [[time_us for time_us, _ in own if time_us > long_us] for own in falling]
    widths = [math.ceil(max(side_by_side) / chunk_us - _SPARE_SHARE) for side_by_side in zip_longest(*long, fillvalue=chunk_us)]
    if num_chunks > MOST_CHUNKS:
        return None
    rest = _rest(num_chunks - sum(widths), shape, chunkers[0].problem.num_ranks, at_least=0 if widths else 1)
    runs = [(1.0,) * width for width in widths]
    runs += [rest[at : at + shape.widest] for at in range(0, len(rest), shape.widest)]
    held = [_held(*of, runs) for of in zip(falling, map(len, long), strict=True)]
    tables: list[list[Chunk]] = [[] for _ in chunkers]
    sizes = []
    for number, shares in enumerate(runs):
        of_run = [own[number] for own in held]
        capped = [*map(_capped_at_twice_mean, chunkers, of_run, repeat(len(shares)))] if streams else chunkers
        cuts = _cut_alike(capped, of_run, shares, least_tokens)
        if cuts is None:
            return None
        for table, own in zip(tables, cuts, strict=True):
            table += own
        sizes.append(len(cuts[0]))
    if len(tables[0]) > MOST_CHUNKS:
        return None
    return Aligned(tuple(map(tuple, tables)), tuple(filter(None, sizes)) if len(tables) > 1 else ())


def _capped_at_twice_mean(chunker: Chunker, run: Sequence[Timed], num_slices: int) -> Chunker:
    longest = max((chunker.problem.lengths[q] for _, sequences in run for q in sequences), default=0)
    cap = round_up(-(-2 * longest // num_slices), chunker.problem.token_multiple)
    return replace(chunker, token_cap=min(chunker.token_cap, cap)) if longest and num_slices > 1 else chunker


def _cut_alike(
    chunkers: Sequence[Chunker], runs: Sequence[Sequence[Timed]], shares: Sequence[float], least_tokens: int
) -> list[list[Chunk]] | None:
    """Cut a run of every replica into equally many chunks; None if some have too little.

    A token cap may ask for more chunks than there are shares, in one replica and then in all.
    """
    for _ in range(_ROUNDS):
        cuts = [_cut(*of, shares, least_tokens, len(runs) == 1) for of in zip(chunkers, runs, strict=True)]
        most = max(map(len, cuts))
        if all(len(own) == most for own in cuts):
            return cuts
        shares, least_tokens = (1.0,) * most, 1
    return None


def _rest(num_chunks: float, shape: Shape, num_ranks: int, *, at_least: int) -> tuple[float, ...]:
    """Return the shares of a chunk's time that chunks behind those of long sequences have, of about so many in all."""
    rising, falling = (
        [1 - (1 - shape.ends.least) * number / count for number in range(1, count + 1)]
        for count in (int(shape.ends.rising * num_ranks), int(shape.ends.falling * num_ranks))
    )
    while (rising or falling) and sum(rising) + sum(falling) > num_chunks:  # there are few: the largest of these go
        longer = rising if 2 * len(rising) > len(falling) else falling
        del longer[:1]
    left, is_even = num_chunks - sum(rising) - sum(falling), shape.ends == EVEN and not shape.is_free
    # A small rest joins the small ends, and is a chunk of its own where there are none.
    between = max(0 if rising or falling else at_least, math.ceil(left - _SPARE_SHARE) if is_even else round(left))
    return (*rising[::-1], *[1.0] * between, *falling)


def falling_times(chunker: Chunker) -> list[Timed]:
    """Return every sequence, group of sequences with one loss, or tree, the one that takes longest first."""
    problem, groups = chunker.problem, dict[int, list[int]]()
    times_us = [*map(chunker.own_us, range(len(problem.lengths)))]
    group_of = {q: number for number, group in enumerate(problem.indivisible) for q in group}
    for q in sorted(group_of, key=lambda q: (-times_us[q], q)):
        groups.setdefault(group_of[q], []).append(q)
    of_groups = ((sum(times_us[q] for q in own), tuple(own)) for own in groups.values())
    return sorted(of_groups, key=lambda each: (-each[0], each[1]))


def _held(falling: Sequence[Timed], num_long: int, runs: Sequence[tuple[float, ...]]) -> list[list[Timed]]:
    """Return what every run of one replica holds.

    Others than the long ones, which have the first runs, go where that takes least time for the `runs`' shares.
    """
    held = [[*falling[number : number + 1]] if number < num_long else [] for number in range(len(runs))]
    sizes = np.array([sum(shares) for shares in runs])
    loads_us = np.array([sum(time_us for time_us, _ in own) for own in held])
    for time_us, sequences in falling[num_long:]:
        number = int(((loads_us + time_us) / sizes).argmin())
        held[number].append((time_us, sequences))
        loads_us[number] += time_us
    return held


def _cut(chunker: Chunker, run: Sequence[Timed], shares: Sequence[float], least_tokens: int, keeps_time: bool) -> list[Chunk]:
    """Return the chunks of a run, by their shares of its time.

    There are fewer where there is too little to cut, and more where they would have more tokens than the cap. If it
    `keeps_time`, a chunk that ends at the cap leaves the rest of its time to the next, and so later ones take no longer.
    """
    sequences = [q for _, own in run for q in own]
    if not sequences:
        return []
    if (cut := batch_target(chunker.problem, "cut")) is not None:
        return list(cut(chunker, sequences, shares, least_tokens))
    chunker = chunker.without_reads(sequences[0], len(shares))
    lengths, cap, multiple = chunker.problem.lengths, chunker.token_cap, chunker.problem.token_multiple
    unit_us = sum(map(chunker.own_us, sequences)) / sum(shares)
    least = -(-least_tokens // multiple) * multiple
    chunks, parts = list[Chunk](), list[Segment]()
    room_us, room, at = unit_us * shares[0], cap, 0
    for q in sequences:
        begin = 0
        while begin < lengths[q]:
            rest_us, end = chunker.part_us(q, begin, lengths[q]), lengths[q]
            is_last, took_us = at >= len(shares) - 1, 0.0
            if not is_last and rest_us > room_us + _NEAR_SHARE * unit_us:
                end = chunker.cut_near(q, begin, room_us)
                if min(end - begin, lengths[q] - end) < least:  # too little of the sequence on one side of the cut
                    end = begin if parts else chunker.cut_within(q, begin, begin + least)
            if end - begin > room:
                end = begin if parts and lengths[q] - begin <= cap else chunker.cut_within(q, begin, begin + room)
                end = begin if parts and end - begin > room else end
                took_us = chunker.part_us(q, begin, end) if keeps_time else 0.0
            if end > begin:
                parts.append(Segment(q, begin, end))
                room_us -= took_us or (rest_us if end == lengths[q] else room_us)
                room -= end - begin
                begin = end
            if begin < lengths[q] or (not is_last and room_us <= _NEAR_SHARE * unit_us):
                chunks.append(_chunk_of(parts, chunker.problem))
                parts, room = [], cap
                if room_us < took_us or not took_us:  # what another chunk at the cap has no use for is the next share's
                    at = min(at + 1, len(shares) - 1)
                    room_us = unit_us * shares[at] + (room_us if took_us else 0.0)
    return [*chunks, _chunk_of(parts, chunker.problem)] if parts else chunks


def _chunk_of(parts: Sequence[Segment], problem: Problem) -> Chunk:
    """Return a chunk of neighbouring parts; one that goes on comes first if no sequence ends in front of it."""
    *others, last = parts
    if last.end < problem.lengths[last.sequence] and parts[0].start == 0:
        return Chunk((last, *others))
    return Chunk(tuple(parts))
