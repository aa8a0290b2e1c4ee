"""Microbatches as RL frameworks make them of a replica's samples, by the rules that their sources state (versions of 2026)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

Rows = list[list[int]]
"""Lengths of the sequences of every microbatch."""

_FIXED = 24_576
"""verl's measure of a sequence's work: its square, and so many times its length (`seqlen_balancing`, for a model of 7B)."""


def work(length: int) -> int:
    """Return a sequence's work by verl's measure."""
    return length * length + _FIXED * length


def balanced(lengths: Sequence[int], parts: int) -> Rows:
    """Divide sequences into parts of about equal work by largest differencing (Karmarkar and Karp 1982)."""
    # Each entry is a partial division: its spread, a tie-breaker, and for every part its work and its sequences.
    heap = []
    for number, length in enumerate(sorted(lengths, reverse=True)):
        sides = [(work(length), [length]), *[(0, list[int]()) for _ in range(parts - 1)]]
        heap.append((-work(length), number, sides))
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        falling = sorted(first, key=lambda side: -side[0])
        rising = sorted(second, key=lambda side: side[0])
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(falling, rising, strict=True)]
        count += 1
        heapq.heappush(heap, (min(a for a, _ in joined) - max(a for a, _ in joined), count, joined))
    return [sequences for _, sequences in heap[0][2] if sequences]


def verl(lengths: Sequence[int], budget: int) -> Rows:
    """Return as many microbatches as the token budget asks for, of about equal work, the largest in the middle."""
    rows = balanced(lengths, min(len(lengths), max(1, math.ceil(sum(lengths) / budget))))
    falling = sorted(rows, key=lambda row: -sum(map(work, row)))
    return [*falling[::2][::-1], *falling[1::2]]


def slime(lengths: Sequence[int], budget: int) -> Rows:
    """Return microbatches of at most the token budget by first fit in the samples' order, padded to a multiple of 128."""
    rows = _first_fit(lengths, budget)
    return [_padded(row, -(-sum(row) // 128) * 128) for row in rows]


def nemo_rl(lengths: Sequence[int], budget: int) -> Rows:
    """Return microbatches of at most the token budget by first fit decreasing, all padded to the longest."""
    rows = _first_fit(sorted(lengths, reverse=True), budget)
    longest = max(map(sum, rows))
    return [_padded(row, longest) for row in rows]


RULES: dict[str, Callable[[Sequence[int], int], Rows]] = {"verl": verl, "slime": slime, "NeMo-RL": nemo_rl}


def _first_fit(lengths: Sequence[int], budget: int) -> Rows:
    rows: Rows = []
    for length in lengths:
        row = next((row for row in rows if sum(row) + length <= budget), None)
        if row is None:
            rows.append([length])
        else:
            row.append(length)
    return rows


def _padded(row: list[int], tokens: int) -> list[int]:
    """Return a row with padding as one more sequence, which attends to no other."""
    return [*row, tokens - sum(row)] if tokens > sum(row) else row
