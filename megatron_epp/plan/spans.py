"""Tokens at which sequences with spans may be cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Chunk, InfeasibleError, Remedy
from megatron_epp.plan.problem import Spans


def allowed_cuts(length: int, spans: Spans, multiple: int) -> NDArray[np.int64]:
    """Return the tokens of a sequence at which it may be cut, multiples inside of no span, ascending, and its length."""
    at = np.arange(multiple, length, multiple, dtype=np.int64)
    starts, ends = (np.array([getattr(span, name) for span in spans], dtype=np.int64) for name in ("start", "end"))
    before = np.searchsorted(starts, at) - 1  # the last span that begins ahead of the cut
    is_inside = (before >= 0) & (at < ends[before]) if len(spans) else np.zeros(len(at), dtype=np.bool_)
    return np.append(at[~is_inside], length)


def within(ends: Sequence[int], allowed: NDArray[np.int64], most_tokens: int) -> list[int]:
    """Return cuts with as few more, each of `allowed`, as leave no slice of more tokens, where that is possible.

    `ends` are of slices, ascending; the last one is the length of the sequence.
    """
    cuts = [0]
    for end in ends:
        while end - cuts[-1] > most_tokens:
            reach = int(np.searchsorted(allowed, cuts[-1] + most_tokens, side="right")) - 1
            if reach < 0 or allowed[reach] <= cuts[-1]:  # the next one is beyond
                reach = int(np.searchsorted(allowed, cuts[-1], side="right"))
            cuts.append(int(allowed[reach]))
        if end > cuts[-1]:
            cuts.append(end)
    return cuts[1:]


def refuse_forced_cuts(
    lengths: Sequence[int], spans: Sequence[Spans], multiple: int, chunk_tokens: int, name: str = "sequence"
) -> None:
    """Raise `InfeasibleError` where a token cap would cut a span, with the `name` of what has a length, and its number."""
    cap = chunk_tokens // multiple * multiple
    for sequence, (length, own) in enumerate(zip(lengths, spans, strict=True)):
        if length <= cap:
            continue
        before = 0
        for end in within([length], allowed_cuts(length, own, multiple), cap):
            if end - before > cap:
                held = [span for span in own if span.start < end and span.end > before]
                raise InfeasibleError(
                    f"tokens {before} to {end} of {name} {sequence} cannot be cut at a multiple of {multiple} outside of its "
                    f"{len(held)} spans there, the first of tokens {held[0].start} to {held[0].end}; chunks have {cap} tokens "
                    "at most",
                    Remedy("raise", "chunk_tokens", -(-(end - before) // multiple) * multiple),
                )
            before = end


def parted(chunks: Sequence[Chunk], lengths: Sequence[int], spans: Sequence[Spans]) -> str:
    """Return which span a chunk table cuts; empty if it cuts none."""
    for chunk in chunks if spans else ():
        for sequence, _, end in chunk.segments:
            cut = next((span for span in spans[sequence] if span.start < end < span.end), None)
            if cut is not None and end < lengths[sequence]:
                return f"sequence {sequence} is cut at token {end}, inside its span of tokens {cut.start} to {cut.end}"
    return ""
