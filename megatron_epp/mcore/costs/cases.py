"""Choice of the chunks that are timed on a stage, so that the fitted lines hold for the batches of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_epp.cost import causal_pairs
from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.layout import SliceView

MULTIPLE = 64
"""Divisor of every token count; replaced by a multiple of it where the ranks that share tokens need that to divide them."""
LONGEST_CONTEXT = 8192
"""Longest context in tokens that is measured by default; longer ones are extrapolated from the fitted line."""

_TOKENS = (128, 512, 1024, 2048)
_PACKED = _SLICES = (128, 512, 1024)
_PREFIX_SHARES = (0.25, 0.5, 0.75)
"""Prefix lengths of the timed slices, as shares of the context."""
_SEGMENTS = 8
_SHORTEST_CONTEXT = 1024


class Case(NamedTuple):
    """A chunk to be timed: one sequence, a slice behind a prefix, or several sequences of equal length."""

    tokens: int
    segments: int = 1
    prefix: int = 0

    @property
    def pairs(self) -> int:
        return self.segments * causal_pairs(self.prefix, self.prefix + self.tokens // self.segments)

    def chunk(self, sequence: int) -> Chunk:
        each = self.tokens // self.segments
        return Chunk(tuple(Segment(sequence + i, self.prefix, self.prefix + each) for i in range(self.segments)))

    def view(self, sequence: int) -> SliceView | None:
        """Return the view of the case as the last slice of a sequence; None where it has no prefix."""
        length = self.prefix + self.tokens
        return SliceView(sequence, self.prefix, length, length, length) if self.prefix else None


def cases_of(
    context: int, multiple: int = MULTIPLE, factor: int = 1, most_tokens: int = 1 << 30, longest: int = LONGEST_CONTEXT
) -> tuple[Case, ...]:
    """Return the chunks to time.

    Args:
        context: tokens of the longest sequence.
        multiple: divisor of every token count.
        factor: multiplies the token count of every case.
        most_tokens: largest number of tokens that fits on the device.
        longest: longest context in tokens that is measured; longer ones are extrapolated from the fitted line.
    """
    context = min(max(context, _SHORTEST_CONTEXT), longest) // multiple * multiple

    def sizes(tokens: Sequence[int], limit: int) -> list[int]:
        return sorted({max(1, min(factor * n, limit, most_tokens) // multiple) * multiple for n in tokens})

    whole = (Case(tokens) for tokens in sizes(_TOKENS, context))
    packed = (Case(tokens, _SEGMENTS) for tokens in sizes(_PACKED, context))
    prefixes = [int(share * context) // multiple * multiple for share in _PREFIX_SHARES]
    slices = (Case(tokens, prefix=prefix) for prefix in prefixes for tokens in sizes(_SLICES, context - prefix))
    return (*whole, *packed, *slices)
