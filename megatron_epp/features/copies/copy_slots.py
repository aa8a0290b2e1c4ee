"""Choice of the chunks that are copied to the host and back, and of the times: gaps in the use of the link."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Action, Op
from megatron_epp.planner.evaluate import Played, RecomputeSteps, moved_of
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables

COPIED_SHARES = (1.0, 0.5, 0.25, 0.12, 0.06)
"""Fractions of the bytes that would be copied of a chunk, tried in turn until the link has time for one. With two
of these two plans of 24 differ, 1.1 % faster and 0.2 % slower.
"""

Integers = NDArray[np.int64]


class ChosenSlots(NamedTuple):
    """A copy, when it is to start, and the compute action it waits for.

    Copies that start at the same time are ordered by `position`, of the last action of the rank that must have ended, since a
    backward that waits for a load may take no time.
    """

    start_us: float
    position: int
    action: Action
    after: Action | None
    share: float


def choose(
    order: Order, tables: Tables, excess: Sequence[Integers], recompute_steps: RecomputeSteps, played: Played
) -> Iterator[list[tuple[int, Chooser]]]:
    """Yield copies against the times of an order, link by link: its ranks and what they have chosen.

    Ranks that share a link choose in the order of the times at which they are above what they aim at, so that each finds the
    gaps that the others leave. `excess` is that of every rank while each of its actions runs.
    """
    shared = len(set(tables.host_links)) < len(order)
    for number in dict.fromkeys(tables.host_links):
        ranks, link = [rank for rank, other in enumerate(tables.host_links) if other == number], (Busy(), Busy())
        choosers = [
            Chooser(order[rank], tables, recompute_steps, excess[rank], played.of(rank), link, shared) for rank in ranks
        ]
        walks = [chooser.walk() for chooser in choosers]
        turns = [(time_us, at) for at, walk in enumerate(walks) for time_us in islice(walk, 1)]
        heapq.heapify(turns)
        while turns:
            _, at = heapq.heappop(turns)
            for time_us in islice(walks[at], 1):
                heapq.heappush(turns, (time_us, at))
        yield list(zip(ranks, choosers, strict=True))


class Chooser:
    """Chooser of one rank's copies.

    By position in the rank's list, `excess` are bytes above the aim, less with every copy, and `away` bytes that are then away.
    `out` and `back` have the times at which either direction of the link is taken.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        tables: Tables,
        recompute_steps: RecomputeSteps,
        excess: Integers,
        times: tuple[Sequence[float], Sequence[float]],
        link: tuple[Busy, Busy],
        shared: bool,
    ) -> None:
        self.actions, self.tables, self.recompute_steps = actions, tables, recompute_steps
        self.start, self.end = times
        self.chosen: list[ChosenSlots] = []
        self.away: Integers = np.zeros(len(actions), dtype=np.int64)
        self.excess = excess
        self.leaves = {(a.stage, a.chunk): position for position, a in enumerate(actions) if a.op is Op.B}
        self.own, (self.out, self.back), self.shared = Busy(), link, shared

    @property
    def copies(self) -> tuple[tuple[Action, Action | None], ...]:
        """Chosen copies in order, each with the compute action that it waits for."""
        ordered = sorted(self.chosen, key=lambda copy: (copy.start_us, copy.position, copy.action.op is Op.L))
        return tuple((copy.action, copy.after) for copy in ordered)

    def walk(self) -> Iterator[float]:
        """Walk along the rank's list; wherever it is above the aim, copy away the live chunk that is needed again last.

        Yields before each choice the time at which the rank is above the aim, in microseconds.
        """
        alive: list[tuple[int, int, Action]] = []
        if int(self.excess.max()) <= 0:
            return
        for position, action in enumerate(self.actions):
            while alive and self.excess[position] > 0:
                yield self.start[position]
                _, entered, forward = heapq.heappop(alive)
                self._copy(forward, entered, position)
            if action.op is Op.F:
                heapq.heappush(alive, (-self.leaves[action.stage, action.chunk], position, action))

    def _copy(self, forward: Action, entered: int, position: int) -> None:
        _, stage, c = forward
        tables, leaves = self.tables, self.leaves[stage, c]
        kept_bytes = tables.kept_bytes(stage, c, self.recompute_steps[stage][c])
        allowed = self.most_bytes(stage, c, kept_bytes)
        if leaves <= position or not allowed:
            return
        most = min(allowed, int(self.excess[position:leaves].max()))
        for part in COPIED_SHARES:
            share = min(1.0, tables.offloadable_share, -(-int(part * most) * 1024 // kept_bytes) / 1024)
            if self.take(forward, entered, share, self.start[position], self.end[position]):
                return

    def most_bytes(self, stage: int, c: int, kept_bytes: int) -> int:
        """Return the most bytes of a chunk that may be copied; 0 if that is less than the input of a layer, the least copy."""
        allowed = int(kept_bytes * self.tables.offloadable_share)
        return 0 if allowed < min(kept_bytes, self.tables.layer_input(stage, c)) else allowed

    def take(self, forward: Action, entered: int, share: float, wanted_us: float, gone_us: float) -> bool:
        """Copy a share of a chunk's kept bytes in gaps of the link, if any, out as early and back as late as possible."""
        _, stage, c = forward
        tables, leaves = self.tables, self.leaves[stage, c]
        moved = moved_of(tables.kept_bytes(stage, c, self.recompute_steps[stage][c]), tables.layer_input(stage, c), share)
        took_us, needed_us = tables.host_us(moved), self.start[leaves]
        out = earliest((self.own, self.out), self.end[entered], wanted_us, took_us)
        if out is None:
            return False
        back = latest((self.own, self.back), max(out + took_us, gone_us), needed_us, took_us)
        if back is None:
            return False
        for busy, start_us in ((self.own, out), (self.own, back), (self.out, out), (self.back, back)):
            busy.take(start_us, took_us)
        first = bisect_left(self.start, out + took_us)
        last = min(bisect_right(self.end, back), leaves)  # not behind a backward that takes no time
        self.excess[first:last] -= moved
        self.away[first:last] += moved
        # On a link of its own the rank's order is enough: what waits for a gap waits for the rank's copies before it.
        left = min(bisect_right(self.end, out), leaves) - 1 if self.shared else entered
        self.chosen += [
            ChosenSlots(
                out, max(left, entered), forward._replace(op=Op.O), self.actions[left] if left > entered else None, share
            ),
            ChosenSlots(back, last - 1, forward._replace(op=Op.L), self.actions[last - 1], share),
        ]
        return True


class Busy:
    """Intervals of time in which a rank's copies, or a direction of a link, are busy."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = [(-1.0, 0.0), (float("inf"), float("inf"))]

    def earliest(self, after_us: float, before_us: float, took_us: float) -> float | None:
        """Start of the first gap of a length within a time."""
        times = self.times
        for at in range(max(1, bisect_left(times, (after_us, after_us))), len(times)):
            begin = max(times[at - 1][1], after_us)
            if begin + took_us > before_us:
                return None
            if begin + took_us <= times[at][0]:
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


def earliest(both: tuple[Busy, Busy], after_us: float, before_us: float, took_us: float) -> float | None:
    """Start of the first gap of a length that both have within a time."""
    return _of_both(both, after_us, lambda busy, after_us: busy.earliest(after_us, before_us, took_us))


def latest(both: tuple[Busy, Busy], after_us: float, before_us: float, took_us: float) -> float | None:
    """Start of the last gap of a length that both have within a time."""
    end = _of_both(both, before_us, lambda busy, before_us: busy.latest(after_us, before_us, took_us))
    return None if end is None else end - took_us


def _of_both(both: tuple[Busy, Busy], limit_us: float, gap: Callable[[Busy, float], float | None]) -> float | None:
    first, second = both
    while (at_us := gap(first, limit_us)) is not None:
        other_us = gap(second, at_us)
        if other_us is None or other_us == at_us:
            return other_us
        limit_us = other_us
    return None
