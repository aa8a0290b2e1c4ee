"""Plans for training, made in a separate process: planning takes no time from the interpreter that launches the kernels."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megatron_epp import planner
from megatron_epp.cost import Costs
from megatron_epp.plan import Plan
from megatron_epp.plan.serialize import pack
from megatron_epp.planner.exact.refine import Refiner
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.search.budget import Anytime
from megatron_epp.planner.search.estimate import about_us
from megatron_epp.planner.search.lockstep import plan_lockstep
from megatron_epp.planner.service.replica_balance import Division, LockstepGroups, divide
from megatron_epp.planner.service.worker import Worker

KEPT = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context."""


class PackedPlan(NamedTuple):
    """A replica's plan for a global batch.

    Attributes:
        message: the plan as `plan.serialize.pack` writes it.
        planning_us: how long it took to make, and the division before it.
        share: positions of its sequences in the global batch, in the plan's order.
        division: a checksum, the same for all replicas' plans of a batch.
    """

    message: bytes
    planning_us: float
    share: tuple[int, ...]
    division: int = 0


PackedPlans = tuple[PackedPlan, ...]
"""Plans of the replicas of a group, in their order."""

Lengths = tuple[tuple[int, ...], ...]
"""Lengths of the sequences of every replica of a group, ``[replica][sequence]``."""

PlanGroup = Callable[[Problem, Lengths], tuple[Plan, ...]]
"""Function from the problem that all shares have in common, and the lengths of each, to their plans."""


class BackgroundPlanner:
    """Plans the batches of one run for a group of its replicas, from any thread, one at a time.

    Without a budget and with any planner but "milp", equal problems get equal plans, on every machine and after a resume. The
    division over replicas is the same for equal problems in any case.

    Args:
        costs: of every replica's pipeline.
        options: the settings of the user.
        lockstep_group: index in `lockstep_groups` of the group to plan for.
        lockstep_groups: all replicas that share a batch. Replicas of a group share experts and get lockstep plans.
    """

    def __init__(
        self, costs: Costs, options: Options, lockstep_group: int = 0, lockstep_groups: LockstepGroups = ((0,),)
    ) -> None:
        self._worker = Worker(_planning, costs, options, lockstep_group, lockstep_groups)
        self._lock = threading.Lock()

    def plan(self, problem: Problem) -> PackedPlans:
        """Plan the shares that the group's replicas have of a batch, in their order.

        Args:
            problem: with the lengths of the whole global batch.

        Raises:
            what `planner.plan` raises, and `WorkerError` when the process has ended.
        """
        with self._lock:
            packed: PackedPlans = self._worker.call(problem)
        return packed

    def close(self) -> None:
        """End the process. A thread that waits for a plan gets a `WorkerError`."""
        self._worker.close()


def _planning(
    costs: Costs, options: Options, lockstep_group: int, lockstep_groups: LockstepGroups
) -> Callable[[Problem], PackedPlans]:
    """Make the function that the process calls for every batch."""
    steady = replace(options, planner="greedy" if options.planner == "milp" else options.planner, budget_ms=None)

    @functools.lru_cache(KEPT)
    def repeatable(problem: Problem, shares: Lengths) -> tuple[Plan, ...]:
        problems = [replace(problem, lengths=share) for share in shares]
        return plan_lockstep(problems, costs, steady) if len(shares) > 1 else (planner.plan(problems[0], costs, steady),)

    plan: PlanGroup = repeatable
    if options.planner == "milp":
        plan = _of_one(Refiner(costs, options).plan)
    elif options.budget_ms:
        plan = _of_one(Anytime(costs, options).plan)

    @functools.lru_cache(KEPT)
    def divided(problem: Problem) -> Division:
        if lockstep_groups == ((0,),):
            return Division((tuple(range(len(problem.lengths))),), (0.0,))

        def slowest_us(shares: Lengths) -> float:
            return max(about_us(replace(problem, lengths=share), costs, steady) for share in shares)

        return divide(problem, costs, lockstep_groups, slowest_us)

    return functools.partial(_packed, plan, divided, lockstep_groups[lockstep_group])


def _of_one(plan: Callable[[Problem], Plan]) -> PlanGroup:
    """Wrap a planner of one replica as a planner of a group of one."""
    return lambda problem, shares: (plan(replace(problem, lengths=shares[0])),)


def _packed(
    plan: PlanGroup,
    divided: Callable[[Problem], Division],
    lockstep_group: tuple[int, ...],
    problem: Problem,
) -> PackedPlans:
    start_s = time.perf_counter()
    division = divided(problem)
    shares = [division.shares[replica] for replica in lockstep_group]
    lengths = tuple(tuple(problem.lengths[at] for at in share) for share in shares)
    made = plan(replace(problem, lengths=()), lengths)
    planning_us = (time.perf_counter() - start_s) * 1e6
    return tuple(PackedPlan(pack(one), planning_us, share, division.checksum) for one, share in zip(made, shares, strict=True))
