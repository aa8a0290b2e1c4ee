"""InfiniPipe's sequence processor: Algorithm 1 of the paper, "workload-balanced sequence chunking"."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.chunks.chunker import Chunker


def algorithm_1(chunker: Chunker, slices: int, *, more_tokens: bool = False) -> tuple[Chunk, ...]:
    """Cut the longest sequence into slices of equal time, all others at the same places, and pack the short ones.

    Longest in time first, a short sequence goes to the bucket with the smallest time per token that has room for it under the
    time and the token threshold. A bucket of its own is opened when the emptiest has no token room; the time threshold is
    loosened when only time stands in the way. Where the paper takes the least time of all buckets for that, which need not
    have token room (and then nothing changes, for ever), this takes the least of those that have.

    Args:
        chunker: times and the token capacity.
        slices: of the longest sequence, the paper's K.
        more_tokens: the paper's expression for the token threshold did not survive. False takes the tokens of the first, which
            is the longest, slice; True takes as many as short sequences need to fill the time threshold.

    Returns:
        Chunks in forward order: long sequences first, the longest first, then batched chunks.
    """
    lengths, ends = chunker.problem.lengths, chunker.mesh(slices)
    longest_first = sorted(range(len(lengths)), key=lambda q: (-lengths[q], q))
    long = [q for q in longest_first if lengths[q] > ends[0]]
    short = [q for q in longest_first if lengths[q] <= ends[0]]
    cuts = [[0, *(end for end in ends if end < lengths[q]), lengths[q]] for q in long]
    time_limit_us = max(chunker.slice_us(start, end) for start, end in pairwise([0, *ends]))
    token_limit = max(end - start for start, end in pairwise([0, *ends]))
    short_us = sum(chunker.sequence_us(lengths[q]) for q in short)
    if more_tokens and short_us > 0:
        fill = round(time_limit_us * sum(lengths[q] for q in short) / short_us)
        token_limit = min(chunker.token_cap, max(token_limit, fill))
    buckets = _Buckets(time_limit_us, token_limit)
    for number, q in enumerate(long):
        start = cuts[number][-2]
        buckets.open(chunker.slice_us(start, lengths[q]), lengths[q] - start)
    for q in short:
        buckets.put(q, chunker.sequence_us(lengths[q]), lengths[q])
    whole = [tuple(Segment(q, 0, lengths[q]) for q in held) for held in buckets.held]
    chunks = []
    for q, cut, riders in zip(long, cuts, whole, strict=False):
        parts = [(Segment(q, start, end),) for start, end in pairwise(cut)]
        chunks += [*map(Chunk, parts[:-1]), Chunk(parts[-1] + riders)]
    return (*chunks, *map(Chunk, whole[len(long) :]))


class _Buckets:
    """The buckets of Algorithm 1 as columns."""

    def __init__(self, time_limit_us: float, token_limit: int) -> None:
        self.time_limit_us, self.token_limit = time_limit_us, token_limit
        self.held: list[list[int]] = []
        self.time_us = np.zeros(64)
        self.tokens = np.zeros(64, dtype=np.int64)

    def open(self, time_us: float, tokens: int) -> int:
        number = len(self.held)
        if number == len(self.tokens):
            self.time_us = np.concatenate([self.time_us, np.zeros(number)])
            self.tokens = np.concatenate([self.tokens, np.zeros(number, dtype=np.int64)])
        self.time_us[number], self.tokens[number] = time_us, tokens
        self.held.append([])
        return number

    def put(self, sequence: int, time_us: float, tokens: int) -> None:
        number = self._find(time_us, tokens)
        if number is None:
            number = self.open(0.0, 0)
        self.time_us[number] += time_us
        self.tokens[number] += tokens
        self.held[number].append(sequence)

    def _find(self, time_us: float, tokens: int) -> int | None:
        """The bucket for a sequence, the time limit loosened if need be; None for a new one."""
        count = len(self.held)
        times, sizes = self.time_us[:count], self.tokens[:count]
        room = sizes + tokens <= self.token_limit
        if not room.any():
            return None
        fits = room & (times + time_us <= self.time_limit_us)
        if not fits.any():
            self.time_limit_us = float(times[room].min()) + time_us
            fits = room & (times + time_us <= self.time_limit_us)
        return int(np.where(fits, times / sizes, np.inf).argmin())
