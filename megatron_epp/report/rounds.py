"""Comparison of measurements taken in alternating rounds: medians with their spread, and whether a difference is certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

_LOAD_MARGIN = 0.5
"""Load average, besides that of the measured ranks, from which on the machine counts as busy."""
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
    """Yield the order of each round: each name once, and every round begins with another, so that no place is one name's."""
    for number in range(rounds):
        first = number % len(names)
        yield (*names[first:], *names[:first])


def is_busy(load: float, own: int) -> bool:
    """Return whether a load average during a run is more than its own ranks', or than there are cores for them."""
    return load > own + _LOAD_MARGIN


def doubt(first: Rounds, second: Rounds, load: float, num_ranks: int) -> str:
    """Say why a difference between two measurements is not certain; empty if it is.

    Args:
        first, second: the measurements.
        load: average during the rounds, the measured ranks included.
        num_ranks: ranks that were measured at a time.
    """
    if is_busy(load, num_ranks):
        return f"{_BUSY} (load {load:.1f} with {num_ranks} ranks)"
    if min(len(first.values), len(second.values)) == 1:
        return "inconclusive: one round has no spread"
    return f"{_BUSY} (the measured times overlap)" if first.overlaps(second) else ""
