"""Chunking: slices of equal time, short sequences packed (InfiniPipe, section III-B)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatron_epp.cost import Costs, LinearTime, causal_pairs
from megatron_epp.cost.work import span_work
from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.chunks.packing import Bucket, PackedItem, pack
from megatron_epp.planner.order import arranged, has_groups
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.spans import allowed_cuts, within

MOST_CHUNKS = 1024
"""No grain aims at more chunks than that. Not measured: planning time grows with chunks, and a token cap far below the longest
sequence could ask for 20 times as many.
"""
UNCUT_EXCESS_SHARE, SPARE_TOKEN_SHARE = 0.25, 0.02
"""In lockstep: share of the time aimed at by which the longest sequence may exceed it before it is cut once more, and share of
the tokens that are typical for that time by which a chunk of short sequences may exceed them.

Makespans of 30 batches of replicas that share experts are 2.0 % shorter than with the grains of one replica, 8.3 % at best and
0.7 % longer at worst. Other values were tried where these grains were of all replicas in lockstep, also of those that have
equally many chunks without: 2.0 % then, 2.2 % with a `SPARE_TOKEN_SHARE` of 0.05, 0.9 % with a `UNCUT_EXCESS_SHARE` of 0.5.
"""


@dataclass(frozen=True, slots=True)
class Grain:
    """Granularity of a chunk table.

    Attributes:
        slices: number of slices of the longest sequence.
        time_us: time aimed at for a chunk, without its fixed part.
        spare: share by which a chunk of short sequences may have more tokens than they typically have in that time. Without any
            a few are left over, for one chunk more, and all replicas in lockstep would have to cut one more.
    """

    slices: int
    time_us: float
    spare: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunker:
    """The facts of a batch that all its chunkings share.

    Attributes:
        problem: the batch.
        line: forward and backward of the slowest stage, without the fixed part: what chunks are balanced by. The slowest
            stage sets the pace, so its time is the one that should not vary from chunk to chunk.
        token_cap: most tokens of a chunk, a multiple of the padding.
        total_us: time of the whole batch.
        span_us: time of a unit of spans' work; 0 where another stage than the first is the slowest.
        equal_lengths_at_cap: slices are of equal length where those of equal time would exceed the token cap. If not, the cap
            bounds the time of the first slice, and so of all. Tokens late in a sequence take longer, so where the cap is far
            below the longest sequence, that makes many times as many slices.
    """

    problem: Problem
    line: LinearTime
    token_cap: int
    total_us: float
    equal_lengths_at_cap: bool = False
    span_us: float = 0.0

    @staticmethod
    def of(problem: Problem, costs: Costs, chunk_tokens: int | None) -> Chunker:
        """Return the chunker of a problem's batch.

        Args:
            costs: time of a stage, by which work is balanced.
            chunk_tokens: most padded tokens of a chunk; None for no limit.
        """
        tokens = sum(problem.lengths)
        pairs = sum(causal_pairs(0, length) for length in problem.lengths)
        slowest, span_us = slowest_line(problem, costs)
        token_us, pair_us = max(0.0, slowest.per_token_us), max(0.0, slowest.per_pair_us)
        line = LinearTime(0.0, token_us, pair_us, per_read_us=slowest.per_read_us)
        if line == LinearTime():  # costs nothing: balance tokens
            line = LinearTime(0.0, 1.0)
        multiple = problem.token_multiple
        most = round_up(max(tokens, 1), multiple) if chunk_tokens is None else chunk_tokens // multiple * multiple
        total_us = line.time_us(tokens, pairs) + span_us * all_span_work(problem)
        return Chunker(problem, line, most, total_us, span_us=span_us)

    @property
    def variants(self) -> tuple[Chunker, ...]:
        """Chunkers to try: this one and, if the token cap binds, one with `equal_lengths_at_cap`, alone if it has too many."""
        if max(self.problem.lengths) <= self.token_cap:
            return (self,)
        other = replace(self, equal_lengths_at_cap=True)
        return (self, other) if self._num_equal_time_slices <= MOST_CHUNKS else (other,)

    @property
    def _num_equal_time_slices(self) -> int:
        """Slices of the longest sequence that all take as long as the first may under the token cap."""
        return math.ceil(self.sequence_us(max(self.problem.lengths)) / self.sequence_us(self.token_cap) - 1e-9)

    def grain(self, *, slices: int | None = None, chunks: float = 0.0) -> Grain:
        """The grain with a number of slices of the longest sequence, or with about so many chunks in all.

        The token cap may ask for more slices. Slices are never smaller than the padding multiple.
        """
        longest_us = self._longest_us
        if slices is None:
            slices = math.ceil(longest_us * chunks / self.total_us - 1e-9)
        slices = self._allowed_slices(slices)
        return Grain(slices, longest_us / slices if slices > 1 or not chunks else max(longest_us, self.total_us / chunks))

    def lockstep_grain(self, chunks: float) -> Grain:
        """The grain with about so many chunks in all, where another replica must have as many.

        Chunks of short sequences take the time aimed at, also where slices of the longest take less: as short as those, chunks
        could be twice as many, and every replica would have to cut as finely as the one whose longest sequence fits worst.
        """
        aimed_us = self.total_us / chunks
        slices = self._allowed_slices(math.ceil(self._longest_us / aimed_us - UNCUT_EXCESS_SHARE))
        return Grain(slices, max(self._longest_us / slices, aimed_us), SPARE_TOKEN_SHARE)

    def _allowed_slices(self, slices: int) -> int:
        longest = max(self.problem.lengths)
        if longest > self.token_cap and not self.equal_lengths_at_cap:
            slices = max(slices, self._num_equal_time_slices)
        return max(1, min(slices, -(-longest // self.problem.token_multiple)))

    def capped_at_twice_mean(self, grain: Grain) -> Chunker:
        """Return the chunker with a token cap of twice the mean tokens of the slices of the longest sequence.

        Slices of equal time are uneven in tokens, and so in the memory of their passes: the first of a very long sequence are
        many times as long.
        """
        multiple = self.problem.token_multiple
        twice_mean = round_up(-(-2 * max(self.problem.lengths) // grain.slices), multiple)
        return replace(self, token_cap=min(self.token_cap, twice_mean))

    def table_capped_at_twice_mean(self, grain: Grain) -> tuple[Chunk, ...]:
        """The chunk table of the finest grain that has no more slices with `capped_at_twice_mean` than a grain has without."""
        most, slices = len(self.slice_ends(grain.slices)), grain.slices
        while slices > 1:
            fewer = Grain(slices, self._longest_us / slices)
            capped = self.capped_at_twice_mean(fewer)
            num_slices = len(capped.slice_ends(slices))
            if num_slices <= most:
                return capped.table(fewer)
            slices = min(slices - 1, slices * most // num_slices)
        return self.table(grain)

    def equal_length_table(self, slices: int) -> tuple[Chunk, ...]:
        """The chunk table with so many slices of the longest sequence, whose lengths differ by one padding multiple at most."""
        longest, multiple = max(self.problem.lengths), self.problem.token_multiple
        ends = [round_up(-(-longest * k // slices), multiple) for k in range(1, slices)]
        capped = replace(self, token_cap=ends[0] if ends else self.token_cap)
        return capped.table_from_ends([*ends, longest], self._longest_us / slices)

    def sequence_us(self, tokens: int) -> float:
        return self.line.time_us(tokens, causal_pairs(0, tokens))

    def slice_us(self, start: int, end: int) -> float:
        return self.line.time_us(end - start, causal_pairs(start, end), start)

    def part_us(self, sequence: int, start: int, end: int) -> float:
        """Time of tokens ``[start, end)`` of a sequence, with its spans there."""
        time_us = self.slice_us(start, end)
        return time_us + self.span_us * span_work(spans[sequence], start, end) if (spans := self.problem.spans) else time_us

    @property
    def _longest_us(self) -> float:
        """Time of the sequence that takes longest."""
        lengths = self.problem.lengths
        if not self.problem.spans:
            return self.sequence_us(max(lengths))
        return max(self.part_us(q, 0, length) for q, length in enumerate(lengths))

    def slice_ends(self, slices: int) -> list[int]:
        """Ends of the slices of the longest sequence: equal times, so later slices are shorter.

        All but the last are multiples of the padding; no slice exceeds the token cap. With `equal_lengths_at_cap` there are
        slices of equal length first, as many as leave none of that time above the cap.
        """
        longest, multiple = max(self.problem.lengths), self.problem.token_multiple
        if self.line.per_read_us:  # a slice of the mean length has as many pairs with each token that it reads
            pair_us = self.line.per_pair_us + self.line.per_read_us * slices / longest
            return replace(self, line=LinearTime(0.0, self.line.per_token_us, pair_us)).slice_ends(slices)
        whole_us, time_us = self.sequence_us(longest), self.sequence_us(longest) / slices
        ends: list[int] = []
        before = 0
        if self.equal_lengths_at_cap:
            equal = round_up(-(-longest // -(-longest // self.token_cap)), multiple)
            while before + equal < longest and self.slice_us(before, before + self.token_cap) < time_us:
                before += equal
                ends.append(before)
            slices = max(1, math.ceil(self.slice_us(before, longest) / time_us - 1e-9))
        start_us = self.sequence_us(before)
        for number in range(1, slices + 1):
            end = longest
            if number < slices:
                part_us = start_us + (whole_us - start_us) * number / slices
                end = (self._prefix(part_us) + multiple // 2) // multiple * multiple
            if number < slices and end >= longest:
                continue
            while end - before > self.token_cap:
                before += self.token_cap
                ends.append(before)
            if end > before:
                before = end
                ends.append(end)
        return ends

    def cut_near(self, sequence: int, time_us: float) -> int:
        """Return the multiple of the padding, or the length, at which the prefix of a sequence takes about so long."""
        multiple = self.problem.token_multiple
        return min(self.problem.lengths[sequence], (self._prefix(time_us) + multiple // 2) // multiple * multiple)

    def _prefix(self, time_us: float) -> int:
        """Tokens of the prefix that takes so long, rounded to the nearest."""
        linear = self.line.per_token_us + self.line.per_pair_us / 2
        return round(2 * time_us / (linear + math.sqrt(linear * linear + 2 * self.line.per_pair_us * time_us)))

    def table(self, grain: Grain) -> tuple[Chunk, ...]:
        """The chunk table of a grain, in forward order: longest sequence first, slices ascending, batched chunks last."""
        slices = grain.slices
        if self.problem.spans and grain.time_us:  # the longest by tokens need not be that by time
            slices = max(1, math.ceil(self.sequence_us(max(self.problem.lengths)) / grain.time_us - 1e-9))
        return self.table_from_ends(self.slice_ends(slices), grain.time_us, grain.spare)

    def table_from_ends(self, ends: Sequence[int], time_us: float, spare: float = 0.0) -> tuple[Chunk, ...]:
        """The chunk table of given slices of the longest sequence.

        Every sequence longer than the first slice of the longest is cut at the same places as the longest, so slices of equal
        number cost the same; its tail slice may take short sequences along.

        Args:
            ends: of the slices of the longest sequence, all but the last multiples of the padding.
            time_us, spare: as in `Grain`.
        """
        lengths = self.problem.lengths
        long = [q for q in longest_first(lengths) if lengths[q] > ends[0]]
        boundaries = slice_boundaries(ends, long, lengths)
        if self.problem.spans:
            boundaries = self._boundaries_with_spans(boundaries, time_us)
            long = list(boundaries)
        parts = [(q, boundaries[q][-2]) for q in long]
        tails = [PackedItem(self.part_us(q, start, lengths[q]), lengths[q] - start, (q,)) for q, start in parts]
        short = [q for q in range(len(lengths)) if q not in boundaries]
        shorts = [PackedItem(self.part_us(q, 0, lengths[q]), lengths[q], (q,)) for q in short]
        limit = self._token_limit(ends[0], shorts, time_us * (1 + spare))
        before: list[Bucket] = []
        if has_groups(self.problem.loss_groups):
            tails, shorts, before = self._by_groups(tails, shorts, time_us, limit)
        buckets = pack(tails, shorts, time_us, limit)
        for own, bucket in zip(before, buckets, strict=False):
            bucket.sequences = own.sequences + bucket.sequences
        fresh = sorted(buckets[len(long) :], key=lambda bucket: (-bucket.time_us, bucket.sequences))
        table = joined(boundaries, [bucket.sequences for bucket in (*buckets[: len(long)], *fresh)], lengths)
        return arranged(table, self.problem.loss_groups)

    def _boundaries_with_spans(self, boundaries: Mapping[int, list[int]], time_us: float) -> dict[int, list[int]]:
        """Return boundaries of all sequences that have several slices, where those with spans are cut by themselves.

        Args:
            boundaries: of long sequences, as if there were no spans.
        """
        lengths, own_boundaries = self.problem.lengths, dict[int, list[int]]()
        for q in longest_first(lengths):
            own = [0, *self._ends_outside_of_spans(q, time_us)] if self.problem.spans[q] else boundaries.get(q, [0, lengths[q]])
            if len(own) > 2:
                own_boundaries[q] = own
        return own_boundaries

    def _ends_outside_of_spans(self, sequence: int, time_us: float) -> list[int]:
        """Return ends of slices of about equal time of a sequence with spans, whose work counts where they begin."""
        length, spans = self.problem.lengths[sequence], self.problem.spans[sequence]
        allowed = allowed_cuts(length, spans, self.problem.token_multiple)
        work = np.cumsum([0.0, *(span.work for span in spans)])
        starts = np.array([span.start for span in spans], dtype=np.int64)
        ahead = self.line.per_token_us * allowed + self.line.per_pair_us * allowed * (allowed + 1) / 2
        ahead = ahead + self.span_us * work[np.searchsorted(starts, allowed)]
        count = max(1, round(ahead[-1] / time_us)) if time_us else 1
        nearest = {int(np.abs(ahead - ahead[-1] * number / count).argmin()) for number in range(1, count)}
        ends = [int(allowed[at]) for at in sorted({*nearest, len(allowed) - 1})]
        return within(ends, allowed, self.token_cap)

    def _by_groups(
        self, tails: Sequence[PackedItem], shorts: Sequence[PackedItem], time_us: float, limit: int
    ) -> tuple[list[PackedItem], list[PackedItem], list[Bucket]]:
        """Join the short sequences of every loss group that fits a chunk; the others get chunks of their groups alone.

        Then a chunk has parts of one group at most, besides whole ones.

        Args:
            tails, shorts: tail slices, and sequences that are not cut.

        Returns:
            tails and chunks of such groups, all as tails to go on with; the joined items; and what is in the first already.
        """
        groups, own_tails = self.problem.loss_groups, dict[int, list[PackedItem]]()
        members: dict[int, list[PackedItem]] = {groups[tail.sequences[0]]: [] for tail in tails}
        for tail in tails:
            own_tails.setdefault(groups[tail.sequences[0]], []).append(tail)
        for item in shorts:
            members.setdefault(groups[item.sequences[0]], []).append(item)
        whole, of_tail, more = list[PackedItem](), dict[PackedItem, Bucket](), list[Bucket]()
        for number, items in members.items():
            its_tails = own_tails.get(number, [])
            tokens = sum(item.tokens for item in items)
            if not its_tails and tokens <= limit:
                sequences = tuple(q for item in items for q in item.sequences)
                whole.append(PackedItem(sum(item.time_us for item in items), tokens, sequences))
                continue
            buckets = pack(its_tails, items, time_us, limit)
            of_tail |= zip(its_tails, buckets, strict=False)
            more += buckets[len(its_tails) :]
        before = [*(of_tail[tail] for tail in tails), *more]
        return [PackedItem(bucket.time_us, bucket.tokens, ()) for bucket in before], whole, before

    def _token_limit(self, first_slice: int, shorts: Sequence[PackedItem], time_us: float) -> int:
        """Tokens of a bucket: what the short sequences make of the time aimed at, and at least the first slice.

        Args:
            first_slice: tokens of the first slice of the longest sequence.
            shorts: sequences that are not cut.
        """
        short_us = sum(item.time_us for item in shorts)
        typical = math.ceil(time_us * sum(item.tokens for item in shorts) / short_us) if short_us > 0 else 0
        most = max((item.tokens for item in shorts), default=0) if self.problem.spans else 0  # some cannot be cut
        return max(min(self.token_cap, max(first_slice, typical)), most)


def slowest_line(problem: Problem, costs: Costs) -> tuple[LinearTime, float]:
    """Time of forward and backward on the stage that takes longest for the batch, and of a unit of spans' work there."""
    tokens, share = sum(problem.lengths), problem.trained_share
    pairs = sum(causal_pairs(0, length) for length in problem.lengths)
    lines = [
        costs.forward_line(stage, share) + (LinearTime() if problem.forward_only else costs.backward_line(stage, share))
        for stage in range(problem.num_stages)
    ]
    span_us = [0.0] * len(lines)
    span_us[0] = costs.span_us("forward") + (0.0 if problem.forward_only else costs.span_us("backward"))
    work = all_span_work(problem)

    def whole_us(pair: tuple[LinearTime, float]) -> float:
        return pair[0].time_us(tokens, pairs) + (len(problem.lengths) - 1) * pair[0].fixed_us + pair[1] * work

    return max(zip(lines, span_us, strict=True), key=whole_us)


def all_span_work(problem: Problem) -> float:
    """Work of all spans of a batch."""
    return sum(span.work for spans in problem.spans for span in spans)


def whole_sequences(lengths: Sequence[int]) -> tuple[Chunk, ...]:
    """One sequence per chunk, in batch order."""
    return tuple(Chunk((Segment(q, 0, length),)) for q, length in enumerate(lengths))


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Positions of the sequences by falling length; of equally long ones the first in the batch comes first."""
    return sorted(range(len(lengths)), key=lambda q: (-lengths[q], q))


def slice_boundaries(ends: Sequence[int], sequences: Iterable[int], lengths: Sequence[int]) -> dict[int, list[int]]:
    """Cut sequences at the same tokens: the start of each, and the end of each of its slices.

    Args:
        ends: of the slices of the longest sequence.
    """
    return {q: [0, *(end for end in ends if end < lengths[q]), lengths[q]] for q in sequences}


def joined(boundaries: Mapping[int, Sequence[int]], held: Iterable[Sequence[int]], lengths: Sequence[int]) -> tuple[Chunk, ...]:
    """Chunk table of slices and whole sequences.

    Args:
        boundaries: of every sliced sequence in forward order: its start, and the end of each slice.
        held: whole sequences that follow the tail slice of each of these, then the sequences of every batched chunk.
    """
    whole = (tuple(Segment(q, 0, lengths[q]) for q in sequences) for sequences in held)
    chunks: list[Chunk] = []
    for q, ends in boundaries.items():
        *parts, tail = ((Segment(q, start, end),) for start, end in pairwise(ends))
        chunks += [*map(Chunk, parts), Chunk(tail + next(whole))]
    return (*chunks, *map(Chunk, whole))


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is no smaller."""
    return -(-number // multiple) * multiple
