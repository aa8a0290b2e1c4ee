"""Plans for training, made in a process beside it: planning takes no time from the interpreter that launches the kernels."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megatron_epp import planner
from megatron_epp.cost import Costs
from megatron_epp.planner.anytime import Anytime
from megatron_epp.planner.balance import Division, divide
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.refine import Refiner
from megatron_epp.planner.worker import Worker
from megatron_epp.schedule import Plan
from megatron_epp.schedule.serialize import pack

KEPT = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context."""


class PackedPlan(NamedTuple):
    """A replica's plan for a global batch.

    Attributes:
        message: the plan as `schedule.serialize.pack` writes it.
        planning_us: how long it took to make, and the division before it.
        share: positions of its sequences in the global batch, in the plan's order.
        imbalance: of the replicas' planned makespans, see `Division`.
        division: a checksum, the same for all replicas' plans of a batch.
    """

    message: bytes
    planning_us: float
    share: tuple[int, ...]
    imbalance: float = 0.0
    division: int = 0


class BackgroundPlanner:
    """Plans the batches of one run for one of its replicas, from any thread, one at a time.

    Without a budget and with any planner but "milp", equal problems get equal plans, on every machine and after a resume. The
    division over replicas is the same for equal problems in any case.

    Args:
        costs: of every replica's pipeline.
        options: what the user fixed.
        replica: the one to plan for.
        replicas: how many share a batch.
    """

    def __init__(self, costs: Costs, options: Options, replica: int = 0, replicas: int = 1) -> None:
        self._worker = Worker(_planning, costs, options, replica, replicas)
        self._lock = threading.Lock()

    def plan(self, problem: Problem) -> PackedPlan:
        """Plan this replica's share of a batch.

        Args:
            problem: with the lengths of the whole global batch.

        Raises:
            what `planner.plan` raises, and `WorkerError` when the process has ended.
        """
        with self._lock:
            packed: PackedPlan = self._worker.call(problem)
        return packed

    def close(self) -> None:
        """End the process. A thread that waits for a plan gets a `WorkerError`."""
        self._worker.close()


def _planning(costs: Costs, options: Options, replica: int, replicas: int) -> Callable[[Problem], PackedPlan]:
    """What the process runs for every batch."""
    steady = replace(options, planner="greedy" if options.planner == "milp" else options.planner, budget_ms=None)
    repeatable = functools.lru_cache(KEPT * replicas)(lambda problem: planner.plan(problem, costs, steady))
    plan: Callable[[Problem], Plan] = repeatable
    if options.planner == "milp":
        plan = Refiner(costs, options).plan
    elif options.budget_ms:
        plan = Anytime(costs, options).plan

    def divided(problem: Problem) -> Division:
        if replicas == 1:
            return Division((tuple(range(len(problem.lengths))),), (0.0,))
        return divide(problem, costs, replicas, lambda share: repeatable(replace(problem, lengths=share)).predicted.makespan_us)

    return functools.partial(_packed, plan, functools.lru_cache(KEPT)(divided), replica)


def _packed(
    plan: Callable[[Problem], Plan], divided: Callable[[Problem], Division], replica: int, problem: Problem
) -> PackedPlan:
    start_s = time.perf_counter()
    division = divided(problem)
    share = division.shares[replica]
    made = plan(replace(problem, lengths=tuple(problem.lengths[at] for at in share)))
    planning_us = (time.perf_counter() - start_s) * 1e6
    return PackedPlan(pack(made), planning_us, share, division.imbalance, division.checksum)
