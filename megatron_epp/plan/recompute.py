"""Recompute: the parts of a forward that a stage's layers run again in a chunk's backward instead of keeping activations."""

from __future__ import annotations

from typing import NamedTuple


class Recompute(NamedTuple):
    """Number of a stage's layers that use each recompute mode in one chunk's backward.

    The stage's first layers recompute whole, the next ones use `linear`, then `mlp`; the remaining layers keep everything.
    """

    whole: int = 0
    """All of the layer; it keeps its input."""
    linear: int = 0
    """All but core attention, whose time grows with the square of the length: its output and log-sum-exp are kept in addition
    to the layer's input."""
    mlp: int = 0
    """The MLP, or the experts, and the norms."""

    @property
    def num_layers(self) -> int:
        """Number of layers that recompute anything."""
        return sum(self)

    def level(self, layer: int) -> str:
        """Recompute mode of the stage's layer with that number, from 0: ``whole``, ``linear``, ``mlp`` or empty."""
        for name, count in zip(LEVELS, self, strict=True):
            if layer < count:
                return name
            layer -= count
        return ""

    def __str__(self) -> str:
        """Format as ``3 whole + 1 linear``, or ``none``."""
        return " + ".join(f"{count} {name}" for name, count in zip(LEVELS, self, strict=True) if count) or "none"


LEVELS = Recompute._fields
"""Names of the recompute modes, most recompute first."""

NO_RECOMPUTE = Recompute()
