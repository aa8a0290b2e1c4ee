"""Comparison of measurements taken in alternating rounds: medians with their spread, and whether a difference is certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

_TAKEN = 0.1
"""Share of the measured ranks' cores that other programs may take before the machine counts as busy."""
_BUSY = "inconclusive: the machine was busy"


@dataclass(frozen=True, slots=True)
class Rounds:
    """One figure, measured once in every round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def range(self) -> tuple[float, float]:
        """Least and largest value."""
        return min(self.values), max(self.values)

    @property
    def spread(self) -> float:
        """Distance between the largest and the least value, as a share of the median."""
        least, most = self.range
        return (most - least) / self.median

    def overlaps(self, other: Rounds) -> bool:
        """Return whether the two ranges have a value in common."""
        (a, b), (c, d) = self.range, other.range
        return a <= d and c <= b


def turns[T](names: Sequence[T], rounds: int) -> Iterator[tuple[T, ...]]:
    """Yield the order of each round: each name once, each round beginning with another one, so that none is always first."""
    for number in range(rounds):
        first = number % len(names)
        yield (*names[first:], *names[:first])


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Use of a machine's cores during a measurement.

    Attributes:
        others: mean number of cores kept busy by programs that the measurement did not start; None if the system does not tell.
        num_ranks: ranks that were measured at a time, each on a core.
        num_cores: of the machine.
    """

    others: float | None
    num_ranks: int
    num_cores: int

    @property
    def is_busy(self) -> bool:
        """True if other programs took more than the cores without a rank and a tenth of the ranks' cores."""
        spare = max(0, self.num_cores - self.num_ranks)
        return self.others is not None and self.others > spare + _TAKEN * min(self.num_ranks, self.num_cores)

    def __str__(self) -> str:
        others = "an unknown number" if self.others is None else f"{self.others:.1f}"
        return f"other programs took {others} of {self.num_cores} cores"


def doubt(first: Rounds, second: Rounds, occupancy: Occupancy) -> str:
    """Say why a difference between two measurements is not certain; empty if it is."""
    if occupancy.is_busy:
        return f"{_BUSY} ({occupancy})"
    if min(len(first.values), len(second.values)) == 1:
        return "inconclusive: one round has no spread"
    return "inconclusive: the measured times overlap" if first.overlaps(second) else ""
