"""Plans for training, made in a separate process: planning takes no time from the interpreter that launches the kernels."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_epp import planner
from megatron_epp.cost import H100, Costs, ModelShape, analytic_costs
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.microbatches import Lengths, PlanMicrobatches
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.service.packed import PackedPlan, PackedPlans
from megatron_epp.planner.service.replica_balance import Division, LockstepGroups, divide
from megatron_epp.planner.service.worker import EndedError, Worker

logger = logging.getLogger(__name__)

NICENESS = 10
"""Niceness of the planning process, which is ahead of training: it runs while ranks leave a core idle. A rank that waits for a
plan leaves its own.
"""
PROCESS_RESTARTS = 3
"""Times that a planning process which has ended is started again for one batch; memory may have been short for a while. Not
measured: with 0 one such moment ends the training, with many a fault that repeats is told late.
"""
CACHED_PLANS = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context. Not measured: other batches
hardly ever come again, and each plan takes memory.
"""
LOADED_OPTIONS = (Options(split_weight=True), Options(offload=True))
"""Options that use all loops of the default planner."""


@functools.cache
def load_planner(options: tuple[Options, ...] = LOADED_OPTIONS) -> None:
    """Plan a small batch with some options, without and with memory caps that matter, as a process does once.

    The compiled loops are read from disk, which takes longer than most plans. Missing ones are compiled, which takes 10 to 25 s
    of a core.

    Planners of other schedules and of users run as they are only where a batch is planned: they use some of these loops.

    Args:
        options: to plan with, by the default planner; of their local search one step is taken.
    """
    shape = ModelShape(
        num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=4, vocab_size=128
    )
    costs = analytic_costs(shape, H100, [2, 2], state_bytes_per_parameter=8.0)
    problem = Problem((70, 9, 33, 64, 12, 5), (0, 1), (planner.UNLIMITED_BYTES,) * 2)
    for asked in options:
        settings = replace(asked, planner="greedy", steps=1, chunk_tokens=None, slices=None, context=None)
        free = planner.plan(problem, costs, settings)
        cap_bytes = tuple(int(0.8 * peak) for peak in free.predicted.peak_bytes)
        planner.plan(replace(problem, cap_bytes=cap_bytes), costs, settings)


class PlanningProcess:
    """A process that plans the batches of one run, from any thread, one at a time.

    Args:
        make: makes the function that the process calls for every batch (`Worker`), given `args`.
        process: of `start_early`, which is used and ended; None to start one.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], *args: Any, process: Worker | None = None) -> None:
        self._start = functools.partial(Worker, make, *args, niceness=NICENESS)
        if process is not None:
            with contextlib.suppress(EndedError):  # `call` starts it again
                process.send(make, *args)
        self._worker = process or self._start()
        self._is_closed = False
        self._lock, self._exchange = threading.Lock(), threading.Lock()

    def call(self, *args: Any) -> Any:
        """Plan a batch. A process that has ended is started again.

        Raises:
            what planning raises, and `WorkerError` when the process ends again and again, or is closed.
        """
        with self._lock:
            for restarts_left in range(PROCESS_RESTARTS, -1, -1):
                try:
                    return self._worker.call(*args)
                except EndedError as ended:
                    if not (restarts_left and self._restarted(ended)):
                        raise
        raise AssertionError("the last restart returns or raises")

    def _restarted(self, ended: EndedError) -> bool:
        """Start the process again. Return False if it is closed."""
        with self._exchange:
            if self._is_closed:
                return False
            logger.warning("%s; it is started again, and plans as before", ended)
            self._worker.close()
            self._worker = self._start()
            return True

    def close(self) -> None:
        """End the process. A thread that waits for a plan gets a `WorkerError`."""
        with self._exchange:
            self._is_closed = True
            self._worker.close()


class BackgroundPlanner(PlanningProcess):
    """Plans the batches of one run for a group of its replicas.

    Equal problems get equal plans, on every machine and after a resume. The division over replicas is the
    same for equal problems in any case.

    Args:
        lockstep_group: index in `lockstep_groups` of the group to plan for.
        lockstep_groups: all replicas that share a batch. Replicas of a group share experts and get lockstep plans.
        process: of `start_early`, which this planner uses and ends; None to start one.
    """

    def __init__(
        self,
        costs: Costs,
        options: Options,
        lockstep_group: int = 0,
        lockstep_groups: LockstepGroups = ((0,),),
        process: Worker | None = None,
    ) -> None:
        super().__init__(_planning, costs, options, lockstep_group, lockstep_groups, process=process)

    def plan(self, problem: Problem, grain: float = 1.0) -> PackedPlans:
        """Plan the shares that the group's replicas have of a batch, in their order. Raises what `planner.plan` raises.

        Args:
            grain: slices of the longest sequence, as a multiple of the fastest plan's. It counts where the planner chooses the
                slices and a plan with these fits.
        """
        plans: PackedPlans = self.call(problem, grain)
        return plans


class MicrobatchPlanner(PlanningProcess):
    """Plans whole microbatches of a caller."""

    def __init__(self) -> None:
        super().__init__(_microbatch_planning)

    def plan(
        self, make: PlanMicrobatches, microbatches: Lengths, problem: Problem, costs: Costs, options: Options
    ) -> tuple[PackedPlan, tuple[int, ...]]:
        """Return the plan that a function of `planner.microbatches` makes, and the microbatch of each of its chunks."""
        plan, order = self.call(make, microbatches, problem, costs, options)
        return plan, order


def _microbatch_planning() -> Callable[..., tuple[PackedPlan, tuple[int, ...]]]:
    _load(Options())

    def packed(make: PlanMicrobatches, *asked: Any) -> tuple[PackedPlan, tuple[int, ...]]:
        start_s = time.perf_counter()
        plan, order = make(*asked)
        return PackedPlan.of(plan, (time.perf_counter() - start_s) * 1e6, ()), order

    return packed


def start_early(options: Options) -> Worker:
    """Start a planning process before there are costs: it loads what it needs for some options while there is no model yet."""
    return Worker(_load, options, niceness=NICENESS)


def _load(options: Options) -> None:
    with contextlib.suppress(EppError):  # told where a batch is planned
        load_planner((options,))


def _planning(
    costs: Costs, options: Options, lockstep_group: int, lockstep_groups: LockstepGroups
) -> Callable[..., PackedPlans]:
    """Make the function that the process calls for every batch."""

    @functools.lru_cache(CACHED_PLANS)
    def plans_of(problems: tuple[Problem, ...], slices: int | None = options.slices) -> tuple[Plan, ...]:
        if len(problems) > 1:
            return plan_lockstep(problems, costs, replace(options, slices=slices))
        return (planner.plan(problems[0], costs, replace(options, slices=slices)),)

    def of_grain(plans: tuple[Plan, ...], problems: tuple[Problem, ...], grain: float) -> tuple[Plan, ...]:
        """Plan with so many times the slices that the fastest plans have; return these where no plan has so many."""
        slices = (Counter(segment.sequence for chunk in plan.chunks for segment in chunk.segments) for plan in plans)
        most = max(count for counts in slices for count in counts.values())
        with contextlib.suppress(EppError):
            return plans_of(problems, max(1, round(grain * most)))
        return plans

    @functools.lru_cache(CACHED_PLANS)
    def divided(problem: Problem) -> Division:
        if lockstep_groups == ((0,),):
            return Division((tuple(range(len(problem.lengths))),), (0.0,))

        def slowest_us(shares: tuple[Problem, ...]) -> float:
            return max(about_us(share, costs, options) for share in shares)

        return divide(problem, costs, lockstep_groups, slowest_us)

    def packed(problem: Problem, grain: float = 1.0) -> PackedPlans:
        start_s = time.perf_counter()
        division = divided(problem)
        shares = [division.shares[replica] for replica in lockstep_groups[lockstep_group]]
        problems = tuple(map(problem.part, shares))
        plans = plans_of(problems)
        if grain != 1.0 and options.slices is None and options.chunk_tokens is None:
            plans = of_grain(plans, problems, grain)
        planning_us = (time.perf_counter() - start_s) * 1e6
        return tuple(
            PackedPlan.of(plan, planning_us, share, division.checksum) for plan, share in zip(plans, shares, strict=True)
        )

    return packed
