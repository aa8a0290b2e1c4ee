"""A chunk's window on the cache of its sliced sequence, and the order in which slices must run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_epp.plan import EppError


class RelayError(EppError):
    """A KV cache is in a state that the plan rules out."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """One chunk's window on the cache of its sliced sequence.

    The cache stores the slice; of the sequence's last chunk it stores all tokens, those of other sequences after the sequence's
    end. Other tokens in the chunk of an earlier slice are *beside* the cache: after the slice, where later slices overwrite
    them.

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


def check_forward(layer: int, view: SliceView, filled: int) -> None:
    """Raise `RelayError` if an earlier slice has not run.

    Args:
        filled: number of tokens, from the first, whose keys and values are stored.
    """
    if filled < view.start:
        raise RelayError(
            f"{where(layer, view)}: forward of the slice at token {view.start} finds the keys of {filled} tokens before it"
        )


def check_backward(layer: int, view: SliceView, taken_from: int | None) -> None:
    """Raise `RelayError` if a later slice has not run backward, or this one already has.

    Args:
        taken_from: first token whose gradient has been handed out; None before the first.
    """
    if taken_from is None and not view.is_tail:
        raise RelayError(f"{where(layer, view)}: backward at token {view.start} precedes the last slice's")
    if taken_from is not None and taken_from != view.end:
        raise RelayError(
            f"{where(layer, view)}: backward of tokens {view.start} to {view.end} is not the next; "
            f"slices have run backward down to token {taken_from}"
        )


def no_cache(layer: int, view: SliceView) -> RelayError:
    """Return the error of a backward without a forward."""
    return RelayError(f"{where(layer, view)}: backward of the slice at token {view.start} finds no cache")


def where(layer: int, view: SliceView) -> str:
    return f"layer {layer}, sequence {view.sequence}"
