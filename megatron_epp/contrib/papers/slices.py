"""Slices of equal time at common places, short sequences packed (InfiniPipe, section III-B): the chunks of papers' planners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.contrib.papers.packing import PackedItem, pack
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import LinearTime, causal_pairs
from megatron_epp.plan import Chunk
from megatron_epp.plan.first_fit import joined, longest_first
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.spans import within
from megatron_epp.planner.chunks.chunker import Chunker, cuts_of, round_up


@dataclass(frozen=True, slots=True)
class Grain:
    """Granularity of a chunk table."""

    slices: int  # number of slices of the longest sequence
    time_us: float  # time aimed at for a chunk, without its fixed part


@dataclass(frozen=True, slots=True)
class Slicer(Chunker):
    """A batch cut into slices."""

    @staticmethod
    def of(problem: Problem, costs: Costs, chunk_tokens: int | None) -> Slicer:
        own = Chunker.of(problem, costs, chunk_tokens)
        return Slicer(own.problem, own.line, own.token_cap, own.total_us, own.span_us)

    def sequence_us(self, tokens: int) -> float:
        return self.line.time_us(tokens, causal_pairs(0, tokens))

    def grain(self, *, slices: int | None = None, chunks: float = 0.0) -> Grain:
        """The grain with a number of slices of the longest sequence, or with about so many chunks in all.

        The token cap may ask for more slices. Slices are never smaller than the padding multiple.
        """
        longest_us = self.longest_us
        if slices is None:
            slices = math.ceil(longest_us * chunks / self.total_us - 1e-9)
        longest = max(self.problem.lengths)
        if longest > self.token_cap:  # all take as long as the first may under the cap
            slices = max(slices, math.ceil(self.sequence_us(longest) / self.sequence_us(self.token_cap) - 1e-9))
        slices = max(1, min(slices, -(-longest // self.problem.token_multiple)))
        return Grain(slices, longest_us / slices if slices > 1 or not chunks else max(longest_us, self.total_us / chunks))

    def equal_length_table(self, slices: int) -> tuple[Chunk, ...]:
        """The chunk table with so many slices of the longest sequence, whose lengths differ by one padding multiple at most."""
        longest, multiple = max(self.problem.lengths), self.problem.token_multiple
        ends = [round_up(-(-longest * k // slices), multiple) for k in range(1, slices)]
        capped = replace(self, token_cap=ends[0] if ends else self.token_cap)
        return capped.table_from_ends([*ends, longest], self.longest_us / slices)

    def slice_ends(self, slices: int) -> list[int]:
        """Ends of the slices of the longest sequence: equal times, so later slices are shorter.

        All but the last are multiples of the padding; no slice exceeds the token cap.
        """
        longest, multiple = max(self.problem.lengths), self.problem.token_multiple
        if self.line.per_read_us:  # a slice of the mean length has as many pairs with each token that it reads
            pair_us = self.line.per_pair_us + self.line.per_read_us * slices / longest
            return replace(self, line=LinearTime(0.0, self.line.per_token_us, pair_us)).slice_ends(slices)
        whole_us, before, ends = self.sequence_us(longest), 0, list[int]()
        for number in range(1, slices + 1):
            end = longest
            if number < slices:
                end = (self._prefix(whole_us * number / slices) + multiple // 2) // multiple * multiple
            if number < slices and end >= longest:
                continue
            while end - before > self.token_cap:
                before += self.token_cap
                ends.append(before)
            if end > before:
                before = end
                ends.append(end)
        return ends

    def _prefix(self, time_us: float) -> int:
        """Tokens of the prefix that takes so long, rounded to the nearest."""
        linear = self.line.per_token_us + self.line.per_pair_us / 2
        return round(2 * time_us / (linear + math.sqrt(linear * linear + 2 * self.line.per_pair_us * time_us)))

    def table(self, grain: Grain) -> tuple[Chunk, ...]:
        """The chunk table of a grain, in forward order: longest sequence first, slices ascending, batched chunks last."""
        slices = grain.slices
        if self.problem.spans and grain.time_us:  # the longest by tokens need not be that by time
            slices = max(1, math.ceil(self.sequence_us(max(self.problem.lengths)) / grain.time_us - 1e-9))
        return self.table_from_ends(self.slice_ends(slices), grain.time_us)

    def table_from_ends(self, ends: Sequence[int], time_us: float) -> tuple[Chunk, ...]:
        """The chunk table of given slices of the longest sequence.

        Every sequence longer than the first slice of the longest is cut at the same places as the longest, so slices of equal
        number cost the same; its tail slice may take short sequences along.

        Args:
            ends: of the slices of the longest sequence, all but the last multiples of the padding.
            time_us: as in `Grain`.
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
        limit = self._token_limit(ends[0], shorts, time_us)
        buckets = pack(tails, shorts, time_us, limit)
        fresh = sorted(buckets[len(long) :], key=lambda bucket: (-bucket.time_us, bucket.sequences))
        return joined(boundaries, [bucket.sequences for bucket in (*buckets[: len(long)], *fresh)], lengths)

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
        allowed, ahead = cuts_of(length, spans, self.problem.token_multiple, self.line, self.span_us)
        count = max(1, round(ahead[-1] / time_us)) if time_us else 1
        nearest = {int(np.abs(ahead - ahead[-1] * number / count).argmin()) for number in range(1, count)}
        ends = [int(allowed[at]) for at in sorted({*nearest, len(allowed) - 1})]
        return within(ends, allowed, self.token_cap)

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


def slice_boundaries(ends: Sequence[int], sequences: Iterable[int], lengths: Sequence[int]) -> dict[int, list[int]]:
    """Cut sequences at the same tokens: the start of each, and the end of each of its slices.

    Args:
        ends: of the slices of the longest sequence.
    """
    return {q: [0, *(end for end in ends if end < lengths[q]), lengths[q]] for q in sequences}
