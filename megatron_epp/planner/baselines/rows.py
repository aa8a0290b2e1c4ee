"""Rows and chunks of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_epp.plan import Chunk, InfeasibleError, Remedy, Segment
from megatron_epp.planner.baselines.contest import MOST_CHUNKS
from megatron_epp.planner.chunks.chunker import round_up
from megatron_epp.planner.problem import Options, Problem


def context_tokens(problem: Problem, options: Options) -> int:
    """Tokens of a row, padding included: the context length, or the longest sequence where none is given.

    Raises:
        InfeasibleError: a sequence is longer.
    """
    longest = max(problem.lengths)
    context = longest if options.context is None else options.context
    if longest > context:
        raise InfeasibleError(
            f"planner {options.planner!r} does not cut sequences: one of {longest} tokens does not fit rows of {context}",
            Remedy("raise", "context", longest),
        )
    return round_up(context, problem.token_multiple)


def first_fit(items: Iterable[tuple[int, int]], room: int, bins: Sequence[int] = ()) -> list[list[int]]:
    """Put each item into the first bin with room.

    Args:
        items: (what, tokens); one above `room` has a bin of its own.
        room: tokens of a bin.
        bins: tokens already in bins that stand first.

    Returns:
        What each bin got, in the order given; as many new bins as it took follow those given.
    """
    held: list[list[int]] = [[] for _ in bins]
    left = [room - tokens for tokens in bins]
    for what, tokens in items:
        at = next((at for at, free in enumerate(left) if tokens <= free), None)
        if at is None:
            at = len(held)
            held.append([])
            left.append(room)
        held[at].append(what)
        left[at] -= tokens
    return held


def pack_whole(lengths: Sequence[int], room: int) -> tuple[Chunk, ...]:
    """Whole sequences in rows of at most `room` tokens: first fit, longest first. One that is longer has a row of its own."""
    longest_first = sorted(range(len(lengths)), key=lambda q: (-lengths[q], q))
    rows = first_fit([(q, lengths[q]) for q in longest_first], room)
    return tuple(Chunk(tuple(Segment(q, 0, lengths[q]) for q in row)) for row in rows)


def chunk_sizes(problem: Problem, options: Options) -> list[int]:
    """Fixed chunk sizes worth trying: the one the user gave, or powers of two from a single chunk to `MOST_CHUNKS`, falling."""
    multiple = problem.token_multiple
    if options.chunk_tokens is not None:
        return [options.chunk_tokens // multiple * multiple]
    total = sum(problem.lengths)
    powers = [1 << power for power in range(total.bit_length(), 0, -1) if (1 << power) * MOST_CHUNKS >= total]
    sizes = dict.fromkeys(round_up(size, multiple) for size in powers if size >= min(256, total))
    return list(sizes)


def split(sequence: int, length: int, size: int) -> list[Chunk]:
    """Cut a sequence into slices of one size; the last may be shorter.

    Args:
        sequence: its index in the batch.
        length: its tokens.
        size: tokens of a slice.
    """
    return [Chunk((Segment(sequence, start, min(start + size, length)),)) for start in range(0, length, size)]
