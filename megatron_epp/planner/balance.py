"""Sharing a global batch out over data-parallel replicas so that their plans take about as long.

Replicas wait for each other at the end of every iteration, so the slowest plan decides. Sequences go longest processing time
first to the replica with the least work, as the cost model counts it on the slowest stage, attention included. A makespan is
more than its work (the pipeline's fill, recompute that the caps force, chunks that do not divide evenly), so a few exchanges
follow that are judged by the plans themselves.
"""

from __future__ import annotations

import heapq
import math
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_epp.cost import Costs
from megatron_epp.planner.chunking import Chunker
from megatron_epp.planner.problem import Problem
from megatron_epp.schedule import InfeasibleError, PlanError

Share = tuple[int, ...]
"""Positions in the global batch, ascending."""

Makespan = Callable[[tuple[int, ...]], float]
"""Microseconds that the plan for sequences of these lengths takes."""

ENOUGH = 0.005
"""Imbalance at which no further exchange is tried."""
TRIES = 16
"""Exchanges tried at most, each of which takes two plans."""
ROUNDS = 4
"""Exchanges judged by work alone, per sequence."""


@dataclass(frozen=True, slots=True)
class Division:
    """A global batch shared out.

    Attributes:
        shares: of every replica; each position of the batch is in one of them.
        makespan_us: of every replica's plan.
    """

    shares: tuple[Share, ...]
    makespan_us: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """How much longer than the mean the slowest plan takes: ``max / mean - 1``, the share of time replicas wait."""
        mean_us = sum(self.makespan_us) / len(self.makespan_us)
        return max(self.makespan_us) / mean_us - 1 if mean_us else 0.0

    @property
    def checksum(self) -> int:
        """Of the shares: by it replicas that divide a batch each for themselves find out that they do not agree."""
        return zlib.crc32(repr(self.shares).encode())


def divide(problem: Problem, costs: Costs, replicas: int, makespan_us: Makespan, tries: int = TRIES) -> Division:
    """Share out the sequences of a global batch. Equal arguments give equal divisions, in every process.

    A sequence is never cut between replicas, so one that takes longer than a fair share bounds the balance from below: its
    replica then has nothing else.

    Args:
        problem: with the lengths of the whole batch.
        costs: of the pipeline of every replica.
        replicas: each gets at least one sequence.
        makespan_us: plans a share.
        tries: exchanges judged by it, at most.

    Raises:
        PlanError: there are fewer sequences than replicas.
        InfeasibleError: a share fits no memory cap, as `makespan_us` says it.
    """
    lengths = problem.lengths
    if len(lengths) < replicas:
        raise PlanError(f"{len(lengths)} sequences cannot be shared by {replicas} replicas: raise --global-batch-size")
    work_us = sequence_work(problem, costs)
    shares = longest_first(work_us, replicas)
    shares, _ = _exchange(shares, work_us, lambda share: sum(work_us[at] for at in share), ROUNDS * len(lengths), 0.0)

    def of_plan(share: Share) -> float:
        try:
            return makespan_us(tuple(lengths[at] for at in sorted(share)))
        except InfeasibleError:
            return math.inf

    shares, times_us = _exchange(shares, work_us, of_plan, tries, ENOUGH)
    shares = [tuple(sorted(share)) for share in shares]
    for share, time_us in zip(shares, times_us, strict=True):
        if math.isinf(time_us):
            makespan_us(tuple(lengths[at] for at in share))  # says why
    return Division(tuple(shares), tuple(times_us))


def by_count(count: int, replica: int, replicas: int) -> Share:
    """The share of a replica where sequences are dealt one after the other."""
    return tuple(range(replica, count, replicas))


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
    """Microseconds that each sequence takes the slowest stage, forward and backward, without what chunks take besides."""
    chunker = Chunker.of(replace(problem, lengths=tuple(sorted(problem.lengths))), costs, None)
    return [chunker.sequence_us(length) for length in problem.lengths]


def _exchange(
    shares: list[Share], work_us: Sequence[float], time_us: Callable[[Share], float], tries: int, enough: float
) -> tuple[list[Share], list[float]]:
    """Move sequences, or swap two, between the slowest replica and another, as long as the slower of both gets faster.

    Returns:
        the shares and the time of each.
    """
    times_us = [time_us(share) for share in shares]
    while tries > 0 and max(times_us) > (1 + enough) * sum(times_us) / len(times_us):
        slow = max(range(len(shares)), key=lambda r: (times_us[r], -r))
        for fast, one, other in _candidates(shares, work_us, times_us, slow):
            tries -= 1
            after_us = time_us(one), time_us(other)
            if max(after_us) < times_us[slow]:
                shares = [*shares]
                shares[slow], shares[fast] = one, other
                times_us[slow], times_us[fast] = after_us
                break
            if tries <= 0:
                break
        else:
            break
    return shares, times_us


def _candidates(
    shares: list[Share], work_us: Sequence[float], times_us: Sequence[float], slow: int
) -> Iterator[tuple[int, Share, Share]]:
    """Exchanges worth a try, with the fastest replica first: the other replica, and both shares after it."""
    slow_us = sum(work_us[at] for at in shares[slow])
    for fast in sorted(range(len(shares)), key=lambda r: (times_us[r], r)):
        gap = times_us[slow] - times_us[fast]
        if fast == slow or gap <= 0:
            continue
        moved = _closest(shares[slow], shares[fast], work_us, gap / 2 * slow_us / times_us[slow])
        if moved is None:
            continue
        given, taken = moved
        one = [at for at in shares[slow] if at != given]
        other = [*(at for at in shares[fast] if at != taken), given]
        yield fast, tuple(one if taken is None else [*one, taken]), tuple(other)


def _closest(slow: Share, fast: Share, work_us: Sequence[float], target_us: float) -> tuple[int, int | None] | None:
    """What to give and what to take for it (nothing, or one) so that about so much work moves; None where less than nothing
    or twice as much and more is all there is.
    """
    best: tuple[float, int, int | None] | None = None
    ranked = sorted(fast, key=lambda at: (work_us[at], at))
    offered = [work_us[at] for at in ranked]
    for given in slow:
        wanted_us = work_us[given] - target_us
        at = bisect_left(offered, wanted_us)
        options: list[tuple[float, int | None]] = [(offered[i], ranked[i]) for i in (at - 1, at) if 0 <= i < len(ranked)]
        if len(slow) > 1:
            options.append((0.0, None))
        for taken_us, taken in options:
            miss = abs(wanted_us - taken_us)
            if miss < target_us and (best is None or miss < best[0]):
                best = (miss, given, taken)
    return None if best is None else best[1:]
