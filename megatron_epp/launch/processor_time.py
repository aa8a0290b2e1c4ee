"""Processor time used on this machine: by all programs, and by this process with all that it started (Linux)."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron_epp.report.rounds import Occupancy

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""First numbers of the line ``cpu`` of /proc/stat, in clock ticks; guests' time is in ``user`` and ``nice``, too (proc(5))."""
_PARENT, _OWN_TICKS = 1, slice(11, 15)
"""Positions behind the name in /proc/PID/stat: the parent, and the ticks of the process and of its children that ended."""


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
        busy = sum(count for column, count in zip(_COLUMNS, ticks, strict=False) if column in _BUSY)
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
