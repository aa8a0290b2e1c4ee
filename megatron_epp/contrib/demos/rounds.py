"""Comparison of measurements taken in alternating rounds: medians with their spread, and whether a difference is certain.

For that, the processor time that other programs used meanwhile on this machine (Linux).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_BUSY_COLUMNS = ("user", "nice", "system", "irq", "softirq", "steal")
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""First numbers of the line ``cpu`` of /proc/stat, in clock ticks; guests' time is in ``user`` and ``nice``, too (proc(5))."""
_PARENT, _OWN_TICKS = 1, slice(11, 15)
"""Positions behind the name in /proc/PID/stat: the parent, and the ticks of the process and of its children that ended."""
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


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor time used since the machine started.

    Attributes:
        at_s: time of the reading, by a clock that never goes back.
        all_s: seconds of all programs on all cores, and seconds that a virtual machine was denied.
        own_s: seconds of this process and of all processes below it, ended ones included if their parent has waited for them.
    """

    at_s: float
    all_s: float
    own_s: float

    @staticmethod
    def read(folder: Path = Path("/proc")) -> ProcessorTime | None:
        """Read the processor time used so far; None if the system does not tell, as other systems than Linux.

        Args:
            folder: where the system tells it.
        """
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        try:
            line = (folder / "stat").read_text(encoding="ascii").partition("\n")[0].split()
        except OSError:
            return None
        if line[:1] != ["cpu"] or not any(ticks := [*map(int, line[1:])]):
            return None
        busy = sum(count for column, count in zip(_COLUMNS, ticks, strict=False) if column in _BUSY_COLUMNS)
        return ProcessorTime(time.monotonic(), busy * tick_s, _ticks_below(folder, os.getpid()) * tick_s)

    def cores_of_others_since(self, before: ProcessorTime) -> float:
        """Return the mean number of cores that other programs kept busy since an earlier reading."""
        others_s = (self.all_s - before.all_s) - (self.own_s - before.own_s)
        return max(0.0, others_s) / (self.at_s - before.at_s)


class OthersMeter:
    """Meter of the cores that other programs keep busy during several measurements."""

    def __init__(self) -> None:
        self._cores: list[float] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure during the body. Processes that the body starts count as this program's."""
        before = ProcessorTime.read()
        yield
        after = ProcessorTime.read()
        if before is not None and after is not None:
            self._cores.append(after.cores_of_others_since(before))

    def occupancy(self, num_ranks: int) -> Occupancy:
        """Return the median over the measurements."""
        return Occupancy(median(self._cores) if self._cores else None, num_ranks, os.cpu_count() or 1)


def _ticks_below(folder: Path, top: int) -> int:
    """Sum the clock ticks of a process and of all processes below it."""
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in folder.glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(path.parent.name)
        ticks[process] = sum(map(int, fields[_OWN_TICKS]))
        children[int(fields[_PARENT])].append(process)
    total, below = 0, [top]
    while below:
        process = below.pop()
        total += ticks.get(process, 0)
        below += children[process]
    return total
