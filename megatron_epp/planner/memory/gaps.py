"""Times at which a link to the host is taken, and the gaps between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise


class Busy:
    """Times at which something is taken."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = [(-1.0, 0.0), (float("inf"), float("inf"))]

    def earliest(self, after_us: float, before_us: float, took_us: float) -> float | None:
        """Start of the first gap of a length within a time."""
        at = max(1, bisect_left(self.times, (after_us, after_us)))
        for (_, left), (right, _) in pairwise(self.times[at - 1 :]):
            begin = max(left, after_us)
            if begin + took_us > before_us:
                return None
            if begin + took_us <= right:
                return begin
        return None

    def latest(self, after_us: float, before_us: float, took_us: float) -> float | None:
        """End of the last gap of a length within a time."""
        for at in range(bisect_left(self.times, (before_us, before_us)), 0, -1):
            end = min(self.times[at][0], before_us)
            if end - took_us < after_us:
                return None
            if end - took_us >= self.times[at - 1][1]:
                return end
        return None

    def take(self, start_us: float, took_us: float) -> None:
        insort(self.times, (start_us, start_us + took_us))


class Link:
    """A link to the host, in both directions."""

    def __init__(self) -> None:
        self.out, self.back = Busy(), Busy()


def earliest(both: tuple[Busy, Busy], after_us: float, before_us: float, took_us: float) -> float | None:
    """Start of the first gap of a length that both have within a time."""
    one, other = both
    while (begin := one.earliest(after_us, before_us, took_us)) is not None:
        again = other.earliest(begin, before_us, took_us)
        if again is None or again == begin:
            return again
        after_us = again
    return None


def latest(both: tuple[Busy, Busy], after_us: float, before_us: float, took_us: float) -> float | None:
    """Start of the last gap of a length that both have within a time."""
    one, other = both
    while (end := one.latest(after_us, before_us, took_us)) is not None:
        again = other.latest(after_us, end, took_us)
        if again is None or again == end:
            return None if again is None else again - took_us
        before_us = again
    return None
