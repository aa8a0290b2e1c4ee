"""Comparison of measurements taken in alternating rounds, and of the cores that other programs used meanwhile (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_PROC = Path("/proc")
_IDLE = slice(3, 5)
"""Columns ``idle`` and ``iowait`` of the first line; the eight first columns are all time (proc(5))."""
_OWN = slice(11, 15)
"""Ticks of a process and of its children that ended, behind its name in /proc/PID/stat."""
_TAKEN = 0.1
"""Share of the measured ranks' cores that other programs may take before the machine counts as busy."""


def turns[T](names: Sequence[T], rounds: int) -> Iterator[tuple[T, ...]]:
    """Yield the order of each round: each name once, each round beginning with another one, so that none is always first."""
    for number in range(rounds):
        first = number % len(names)
        yield (*names[first:], *names[:first])


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Use of a machine's cores during a measurement."""

    # Mean number of cores kept busy by programs that the measurement did not start; None if the system does not tell
    others: float | None
    num_ranks: int  # ranks that were measured at a time, each on a core
    num_cores: int  # of the machine

    @property
    def is_busy(self) -> bool:
        """True if other programs took more than the cores without a rank and a tenth of the ranks' cores."""
        spare = max(0, self.num_cores - self.num_ranks)
        return self.others is not None and self.others > spare + _TAKEN * min(self.num_ranks, self.num_cores)

    def __str__(self) -> str:
        others = "an unknown number" if self.others is None else f"{self.others:.1f}"
        return f"other programs took {others} of {self.num_cores} cores"


def doubt(first: Sequence[float], second: Sequence[float], occupancy: Occupancy) -> str:
    """Say why a difference between measurements of several rounds is not certain, before it is said; empty if it is."""
    if occupancy.is_busy:
        return f"inconclusive: the machine was busy ({occupancy}): "
    if min(len(first), len(second)) == 1:
        return "inconclusive: one round has no spread: "
    overlap = min(first) <= max(second) and min(second) <= max(first)
    return "inconclusive: the measured times overlap: " if overlap else ""


class OthersMeter:
    """Meter of the cores that other programs keep busy during several measurements."""

    def __init__(self) -> None:
        self._cores: list[float] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure during the body. Children of this process, and what they have waited for, count as this program's."""
        before, start_s = _others_s(), time.monotonic()
        yield
        after, took_s = _others_s(), time.monotonic() - start_s
        if before is not None and after is not None:
            self._cores.append(max(0.0, after - before) / took_s)

    def occupancy(self, num_ranks: int) -> Occupancy:
        """Return the median over the measurements."""
        return Occupancy(median(self._cores) if self._cores else None, num_ranks, os.cpu_count() or 1)


def _others_s() -> float | None:
    """Return the processor time that other programs have used, in seconds, with a constant added; None if it is not told."""
    try:
        name, *words = (_PROC / "stat").read_text(encoding="ascii").partition("\n")[0].split()
    except (OSError, ValueError):
        return None
    ticks = [*map(int, words[:8])] if name == "cpu" else []
    if not any(ticks):
        return None
    lists = (_PROC / "self" / "task").glob("*/children")
    stats = [(_PROC / child / "stat").read_text(errors="replace") for each in lists for child in each.read_text().split()]
    of_children = sum(int(word) for stat in stats for word in stat.rpartition(")")[2].split()[_OWN])
    return (sum(ticks) - sum(ticks[_IDLE]) - of_children) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
