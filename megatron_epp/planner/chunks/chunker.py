"""Times of a batch's sequences and of their parts: what chunks are balanced by, and where sequences may be cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import IntColumn, LinearTime, TimeColumn, causal_pairs, span_work, tokens_and_pairs
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.problem import Lengths, Problem, Spans
from megatron_epp.plan.spans import allowed_cuts

MOST_CHUNKS = 1024
"""No grain aims at more chunks than that. Not measured: planning time grows with chunks, and a token cap far below the longest
sequence could ask for 20 times as many.
"""


@dataclass(frozen=True, slots=True)
class Chunker:
    """The facts of a batch that all its chunkings share."""

    problem: Problem
    # Forward and backward of the slowest stage, without the fixed part. It sets the pace, so chunks are balanced by it.
    line: LinearTime
    token_cap: int  # most tokens of a chunk, a multiple of the padding
    total_us: float
    span_us: float = 0.0  # time of a unit of spans' work; 0 where another stage than the first is the slowest

    @staticmethod
    def of(problem: Problem, costs: Costs, chunk_tokens: int | None) -> Chunker:
        tokens, pairs = tokens_and_pairs(own_parts(problem))
        slowest, span_us = slowest_line(problem, costs)
        token_us, pair_us = max(0.0, slowest.per_token_us), max(0.0, slowest.per_pair_us)
        line = LinearTime(0.0, token_us, pair_us, per_read_us=slowest.per_read_us)
        if line == LinearTime():  # costs nothing: balance tokens
            line = LinearTime(0.0, 1.0)
        multiple = problem.token_multiple
        most = round_up(max(tokens, 1), multiple) if chunk_tokens is None else chunk_tokens // multiple * multiple
        total_us = line.time_us(tokens, pairs) + span_us * all_span_work(problem)
        return Chunker(problem, line, most, total_us, span_us=span_us)

    def slice_us(self, start: int, end: int) -> float:
        return self.line.time_us(end - start, causal_pairs(start, end), start)

    def part_us(self, sequence: int, start: int, end: int) -> float:
        """Time of tokens ``[start, end)`` of a sequence, with its spans there."""
        time_us = self.slice_us(start, end)
        return time_us + self.span_us * span_work(spans[sequence], start, end) if (spans := self.problem.spans) else time_us

    @property
    def longest_us(self) -> float:
        return max(map(self.own_us, range(len(self.problem.lengths))))

    def own_us(self, sequence: int) -> float:
        """Time of the tokens that a sequence holds itself."""
        return self.part_us(sequence, self.problem.first_token(sequence), self.problem.lengths[sequence])

    def cut_near(self, sequence: int, begin: int, time_us: float) -> int:
        """Return where a sequence may be cut, or its length, so that its tokens from `begin` on take about so long."""
        length, multiple, time_us = self.problem.lengths[sequence], self.problem.token_multiple, max(0.0, time_us)
        if self.problem.spans and (spans := self.problem.spans[sequence]):
            allowed, before_us = _cuts(length, spans, multiple, self.line, self.span_us)
            return int(allowed[np.abs(before_us - self.part_us(sequence, 0, begin) - time_us).argmin()])
        linear, pair_us = self.line.per_token_us + self.line.per_pair_us * (begin + 0.5), self.line.per_pair_us
        tokens = 2 * time_us / (linear + math.sqrt(linear * linear + 2 * pair_us * time_us))
        return min(length, (round(begin + tokens) + multiple // 2) // multiple * multiple)

    def without_reads(self, sequence: int, slices: int) -> Chunker:
        """Return the chunker whose pairs take what slices of a sequence take to read their prefixes: a slice of the mean length
        has as many pairs with each token that it reads.
        """
        if not self.line.per_read_us:
            return self
        pair_us = self.line.per_pair_us + self.line.per_read_us * slices / self.problem.lengths[sequence]
        return replace(self, line=LinearTime(0.0, self.line.per_token_us, pair_us))

    def cut_within(self, sequence: int, begin: int, end: int) -> int:
        """Return the last token up to `end` at which a sequence may be cut behind `begin`, or the next one if there is none."""
        length, multiple = self.problem.lengths[sequence], self.problem.token_multiple
        if self.problem.spans and (spans := self.problem.spans[sequence]):
            allowed, _ = _cuts(length, spans, multiple, self.line, self.span_us)
            first, after = (int(np.searchsorted(allowed, token, side="right")) for token in (begin, end))
            return int(allowed[max(first, after - 1)])
        return length if end >= length else min(length, max(end // multiple, begin // multiple + 1) * multiple)


@lru_cache(maxsize=1024)
def _cuts(length: int, spans: Spans, multiple: int, line: LinearTime, span_us: float) -> tuple[IntColumn, TimeColumn]:
    """Return the tokens at which a sequence with spans may be cut, or ends, and the times of the prefixes."""
    allowed = allowed_cuts(length, spans, multiple)
    work = np.cumsum([0.0, *(span.work for span in spans)])
    starts = np.array([span.start for span in spans], dtype=np.int64)
    before_us = line.per_token_us * allowed + line.per_pair_us * allowed * (allowed + 1) / 2
    return allowed, before_us + span_us * work[np.searchsorted(starts, allowed)]


def slowest_line(problem: Problem, costs: Costs) -> tuple[LinearTime, float]:
    """Time of forward and backward on the stage that takes longest for the batch, and of a unit of spans' work there."""
    share, (tokens, pairs) = problem.trained_share, tokens_and_pairs(own_parts(problem))
    lines = [
        costs.line(stage, "forward", share) + (LinearTime() if problem.forward_only else costs.line(stage, "backward", share))
        for stage in range(problem.num_stages)
    ]
    span_us = [0.0] * len(lines)
    span_us[0] = costs.span_us("forward") + (0.0 if problem.forward_only else costs.span_us("backward"))
    work = all_span_work(problem)

    def whole_us(pair: tuple[LinearTime, float]) -> float:
        return pair[0].time_us(tokens, pairs) + (len(problem.lengths) - 1) * pair[0].fixed_us + pair[1] * work

    return max(zip(lines, span_us, strict=True), key=whole_us)


def own_parts(batch: Lengths | Problem) -> list[tuple[int, int]]:
    """Return the tokens ``[start, end)`` that every sequence holds itself."""
    starts = (tokens for _, tokens in batch.borrowed) if batch.borrowed else (0,) * len(batch.lengths)
    return [*zip(starts, batch.lengths, strict=True)]


def all_span_work(problem: Problem) -> float:
    return sum(span.work for spans in problem.spans for span in spans)


def whole_sequences(lengths: Sequence[int]) -> tuple[Chunk, ...]:
    return tuple(Chunk((Segment(q, 0, length),)) for q, length in enumerate(lengths))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
