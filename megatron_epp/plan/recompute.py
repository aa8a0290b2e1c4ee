"""Recompute: what the layers of a stage run again in a chunk's backward, because they did not keep it."""

from __future__ import annotations

from typing import NamedTuple


class Recompute(NamedTuple):
    """How many of a stage's layers run so much of their forward again in one chunk's backward.

    From the stage's first layer on come those that recompute whole, then those of `linear`, then those of `mlp`; the others
    keep everything.
    """

    whole: int = 0
    """All of the layer; it keeps its input."""
    linear: int = 0
    """All but core attention, whose time grows with the square of the length: its output and log-sum-exp are kept beside the
    layer's input."""
    mlp: int = 0
    """The MLP, or the experts, and the norms."""

    @property
    def num_layers(self) -> int:
        """Layers that recompute anything."""
        return sum(self)

    def level(self, layer: int) -> str:
        """``whole``, ``linear``, ``mlp`` or nothing: what the stage's layer of that number, from 0, recomputes."""
        for name, count in zip(LEVELS, self, strict=True):
            if layer < count:
                return name
            layer -= count
        return ""

    def __str__(self) -> str:
        """``3 whole + 1 linear``, or ``none``."""
        return " + ".join(f"{count} {name}" for name, count in zip(LEVELS, self, strict=True) if count) or "none"


LEVELS = Recompute._fields
"""The levels by name, most recompute first."""

NO_RECOMPUTE = Recompute()
