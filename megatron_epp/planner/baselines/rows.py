"""Rows and chunks of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_epp.plan import Chunk, InfeasibleError, Remedy
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, joined, round_up
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


def first_fit(sequences: Iterable[int], lengths: Sequence[int], room: int, taken: Iterable[int] = ()) -> list[list[int]]:
    """Put each sequence into the first bin with room.

    Args:
        sequences: in the order in which they are put; one above `room` has a bin of its own.
        lengths: tokens of every sequence of the batch.
        room: tokens of a bin.
        taken: tokens already in bins that stand first.

    Returns:
        The sequences of each bin, in the order given; as many new bins as it took follow those given.
    """
    left = [room - tokens for tokens in taken]
    held: list[list[int]] = [[] for _ in left]
    for q in sequences:
        at = next((at for at, free in enumerate(left) if lengths[q] <= free), None)
        if at is None:
            at = len(held)
            held.append([])
            left.append(room)
        held[at].append(q)
        left[at] -= lengths[q]
    return held


def pack_whole(lengths: Sequence[int], room: int) -> tuple[Chunk, ...]:
    """Whole sequences in rows of at most `room` tokens: first fit, longest first. One that is longer has a row of its own."""
    longest_first = sorted(range(len(lengths)), key=lambda q: (-lengths[q], q))
    return joined({}, first_fit(longest_first, lengths, room), lengths)


def fixed_size_chunks(lengths: Sequence[int], size: int, *, standalone: bool = False) -> tuple[Chunk, ...]:
    """Slices of `size` tokens, sequences with the most slices first, and short sequences, first fit.

    Args:
        lengths: tokens of every sequence.
        size: tokens of a slice, the last of a sequence excepted, and most tokens of a chunk.
        standalone: longest first, short sequences have chunks of their own. Otherwise in batch order, they fill up the last
            slices too.
    """
    sequences = sorted(range(len(lengths)), key=lambda q: -lengths[q] if standalone else 0)
    long = sorted((q for q in sequences if lengths[q] > size), key=lambda q: -(-lengths[q] // size), reverse=True)
    cuts = {q: [*range(0, lengths[q], size), lengths[q]] for q in long}
    tails = [size if standalone else lengths[q] - cuts[q][-2] for q in long]
    return joined(cuts, first_fit((q for q in sequences if lengths[q] <= size), lengths, size, tails), lengths)


def chunk_sizes(problem: Problem, options: Options) -> list[int]:
    """Fixed chunk sizes worth trying: the one the user gave, or powers of two from a single chunk to `MOST_CHUNKS`, falling."""
    multiple = problem.token_multiple
    if options.chunk_tokens is not None:
        return [options.chunk_tokens // multiple * multiple]
    total = sum(problem.lengths)
    powers = [1 << power for power in range(total.bit_length(), 0, -1) if (1 << power) * MOST_CHUNKS >= total]
    sizes = dict.fromkeys(round_up(size, multiple) for size in powers if size >= min(256, total))
    return list(sizes)
