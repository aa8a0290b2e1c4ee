"""Window of a chunk on the cache of its sliced sequence."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_epp.plan import EppError


class RelayError(EppError):
    """Error of a KV cache in a state that the plan rules out."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """Window of one chunk on the cache of its sliced sequence.

    The cache stores the slice; of the sequence's last chunk it stores all tokens, those of other sequences after the sequence's
    end. Other tokens in the chunk of an earlier slice are *uncached*: they follow the slice in the buffer, where later slices
    overwrite them.

    Attributes:
        sequence: index of the sequence.
        start: first token of the slice.
        end: one past its last token.
        length: tokens of the whole sequence.
        capacity: tokens the buffer holds: every chunk of the sequence fits after the start of its slice. For a tail, the tokens
            that its chunk fills.
        num_slices: number of slices of the sequence.
    """

    sequence: int
    start: int
    end: int
    length: int
    capacity: int
    num_slices: int = 2

    @property
    def is_tail(self) -> bool:
        return self.end == self.length

    @property
    def stop(self) -> int:
        """End of the rows of the buffer that the chunk fills (exclusive)."""
        return self.capacity if self.is_tail else self.end

    @property
    def num_cached(self) -> int:
        """Number of the chunk's tokens, from its first, that are stored in the buffer."""
        return self.stop - self.start
