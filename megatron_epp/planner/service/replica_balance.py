"""Division of a global batch over data-parallel replicas so that their plans take about equally long.

Sequences go longest processing time first (LPT; Graham, 1969) to the replica with the least work, as the cost model counts it
on the slowest stage, attention included. A makespan is more than its work (the pipeline's fill, recompute that the caps force,
chunks that do not divide evenly), so a few exchanges follow that are judged by makespans, estimated or planned.
"""

from __future__ import annotations

import heapq
import math
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError, PlanError, Remedy
from megatron_epp.plan.problem import LockstepGroups, Problem, Share
from megatron_epp.planner.chunks.chunker import Chunker

Makespan = Callable[[tuple[Problem, ...]], float]
"""Microseconds that a group takes, from the problems of its replicas: their shares of the batch."""

BALANCED_SHARE = 0.005
"""Imbalance at which no further exchange is tried. Other values of it and of the next two were not compared."""
MOST_EXCHANGES = 16
"""Exchanges tried at most, each of which takes the makespans of two groups."""
WORK_EXCHANGES_PER_UNIT = 4
"""Exchanges judged by work alone, per sequence."""


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a global batch over replicas. Every position is in one share; replicas of a group take equally long."""

    shares: tuple[Share, ...]
    makespan_us: tuple[float, ...]

    @property
    def checksum(self) -> int:
        """Checksum of the shares: replicas that each divide the batch themselves detect by it that they do not agree."""
        return zlib.crc32(repr(self.shares).encode())


def divide(
    problem: Problem, costs: Costs, lockstep_groups: LockstepGroups, time_us: Makespan, tries: int = MOST_EXCHANGES
) -> Division:
    """Divide the sequences of a global batch over replicas. Equal arguments give equal divisions, in every process.

    A sequence is never cut between replicas, so one that takes longer than a fair share bounds the balance from below: its
    replica then has nothing else. Sequences whose loss is computed together stay together. In a group of replicas each chunk
    waits for the others' chunks, so long sequences go to the same group. At most `tries` exchanges are judged by `time_us`.

    Raises `PlanError` for fewer sequences, or groups with one loss, than replicas, and `InfeasibleError` if a share fits no
    memory cap.
    """
    units, replicas = problem.indivisible, sum(map(len, lockstep_groups))
    if len(units) < replicas:
        what = "groups of sequences" if problem.loss_groups else "sequences"
        reason = f"{len(units)} {what} cannot be shared by {replicas} replicas"
        raise PlanError(reason, Remedy("raise", "global_batch_size", replicas))
    each_us = sequence_work(problem, costs)
    work_us = [sum(each_us[at] for at in unit) for unit in units]
    shares = longest_first(work_us, replicas)
    alone = tuple((replica,) for replica in range(replicas))
    by_work = _Exchange(alone, work_us, lambda share: sum(work_us[at] for at in share[0]))
    shares = by_work.run(shares, WORK_EXCHANGES_PER_UNIT * len(units), 0.0)[0]
    if len(lockstep_groups) < replicas:
        shares.sort(key=lambda share: (-max(work_us[at] for at in share), share))

    def positions(share: Share) -> Share:
        return tuple(sorted(at for unit in share for at in units[unit]))

    def problems_of(lockstep_group: tuple[Share, ...]) -> tuple[Problem, ...]:
        return tuple(problem.part(positions(share)) for share in lockstep_group)

    def planned_us(lockstep_group: tuple[Share, ...]) -> float:
        try:
            return time_us(problems_of(lockstep_group))
        except InfeasibleError:
            return math.inf

    shares, times_us = _Exchange(lockstep_groups, work_us, planned_us).run(shares, tries, BALANCED_SHARE)
    of_replica: dict[int, float] = {}
    for lockstep_group, slowest_us in zip(lockstep_groups, times_us, strict=True):
        if math.isinf(slowest_us):
            time_us(problems_of(tuple(shares[replica] for replica in lockstep_group)))  # says why
        of_replica |= dict.fromkeys(lockstep_group, slowest_us)
    return Division(tuple(map(positions, shares)), tuple(of_replica[r] for r in range(replicas)))


def longest_first(work_us: Sequence[float], replicas: int) -> list[Share]:
    """Longest processing time first: each sequence to the replica with the least work so far, or with the fewest sequences."""
    loads = [(0.0, 0, replica) for replica in range(replicas)]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for at in sorted(range(len(work_us)), key=lambda at: (-work_us[at], at)):
        load_us, count, replica = heapq.heappop(loads)
        shares[replica].append(at)
        heapq.heappush(loads, (load_us + work_us[at], count + 1, replica))
    return [tuple(share) for share in shares]


def sequence_work(problem: Problem, costs: Costs) -> list[float]:
    """Microseconds that each sequence takes the slowest stage, forward and backward, without the fixed time of chunks."""
    return [*map(Chunker.of(problem, costs, None).own_us, range(len(problem.lengths)))]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Moves or swaps sequences between the slowest group and another, as long as the slower of both gets faster."""

    lockstep_groups: LockstepGroups
    work_us: Sequence[float]
    time_us: Callable[[tuple[Share, ...]], float]

    def run(self, shares: list[Share], tries: int, enough: float) -> tuple[list[Share], list[float]]:
        """Exchange sequences between replicas until the groups' imbalance is `enough` or no exchange helps. Returns the shares
        of the replicas and the time of each group.
        """
        times_us = [self._group_us(shares, lockstep_group) for lockstep_group in self.lockstep_groups]
        while tries > 0 and (math.isinf(max(times_us)) or max(times_us) > (1 + enough) * sum(times_us) / len(times_us)):
            slow = max(range(len(times_us)), key=lambda lockstep_group: (times_us[lockstep_group], -lockstep_group))
            for fast, changed in self._candidates(shares, times_us, slow):
                tries -= 1
                after_us = [self._group_us(changed, self.lockstep_groups[lockstep_group]) for lockstep_group in (slow, fast)]
                if max(after_us) < times_us[slow]:
                    shares = changed
                    times_us[slow], times_us[fast] = after_us
                    break
                if tries <= 0:
                    break
            else:
                break
        return shares, times_us

    def _group_us(self, shares: list[Share], lockstep_group: tuple[int, ...]) -> float:
        return self.time_us(tuple(shares[replica] for replica in lockstep_group))

    def _candidates(self, shares: list[Share], times_us: Sequence[float], slow: int) -> Iterator[tuple[int, list[Share]]]:
        """Yield exchanges worth a try, with the fastest group first: that group, and the replicas' shares after it."""
        giver, giver_us = max(
            ((r, self._work(shares[r])) for r in self.lockstep_groups[slow]), key=lambda each: (each[1], -each[0])
        )
        for fast in sorted(range(len(times_us)), key=lambda lockstep_group: (times_us[lockstep_group], lockstep_group)):
            gap = times_us[slow] - times_us[fast]
            if fast == slow or gap <= 0:
                continue
            taker = min(self.lockstep_groups[fast], key=lambda r: (self._work(shares[r]), r))
            share = gap / (2 * times_us[slow]) if math.isfinite(gap) else 0.5
            moved = _closest(shares[giver], shares[taker], self.work_us, share * giver_us)
            if moved is None:
                continue
            sent, taken = moved
            of_giver = [at for at in shares[giver] if at != sent]
            of_taker = [*(at for at in shares[taker] if at != taken), sent]
            changed = [*shares]
            changed[giver], changed[taker] = tuple(of_giver if taken is None else [*of_giver, taken]), tuple(of_taker)
            yield fast, changed

    def _work(self, share: Share) -> float:
        return sum(self.work_us[at] for at in share)


def _closest(slow: Share, fast: Share, work_us: Sequence[float], target_us: float) -> tuple[int, int | None] | None:
    """Choose a sequence to give and at most one to take for it, so that about `target_us` of work moves. Returns None if no
    pair moves more than nothing and less than twice the target.
    """
    best: tuple[float, int, int | None] | None = None
    ranked = sorted(fast, key=lambda at: (work_us[at], at))
    offered = [work_us[at] for at in ranked]
    for sent in slow:
        wanted_us = work_us[sent] - target_us
        at = bisect_left(offered, wanted_us)
        options: list[tuple[float, int | None]] = [(offered[i], ranked[i]) for i in (at - 1, at) if 0 <= i < len(ranked)]
        if len(slow) > 1:
            options.append((0.0, None))
        for taken_us, taken in options:
            miss = abs(wanted_us - taken_us)
            if miss < target_us and (best is None or miss < best[0]):
                best = (miss, sent, taken)
    return None if best is None else best[1:]
