"""Comparison of a run with Megatron's own: how far each is from a reference, and how far is near enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TIMES = 2.0
"""Largest distance from the reference, as a multiple of the distance of Megatron's own run."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest relative differences from a reference over the iterations.

    Attributes:
        theirs: of Megatron's own run.
        ours: of the run that is compared.
        allowed: largest that passes.
    """

    theirs: float
    ours: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.ours <= self.allowed


def deviation(exact: Sequence[float], theirs: Sequence[float], ours: Sequence[float], floor: float) -> Deviation:
    """Compare two runs with a reference, iteration by iteration.

    Args:
        floor: relative difference that passes, however near Megatron's own run is.
    """
    far = [max(_difference(x, wanted) for x, wanted in zip(column, exact, strict=True)) for column in (theirs, ours)]
    return Deviation(far[0], far[1], max(TIMES * far[0], floor))


def _difference(value: float, wanted: float) -> float:
    """Return the relative difference of two values; infinite if one is not a number."""
    difference = abs(value / wanted - 1)
    return math.inf if math.isnan(difference) else difference
