"""Planning in a process of its own: it takes no time from the interpreter that launches the kernels."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_epp.plan.problem import LockstepGroups, Options, Problem
from megatron_epp.port.packed import MicrobatchLengths, PackedPlan, PackedPlans
from megatron_epp.port.worker import EndedError, Worker

if TYPE_CHECKING:
    from megatron_epp.cost.model import Costs

logger = logging.getLogger(__name__)

_ANSWERS = "megatron_epp.planner.service.answers"
"""Module with what the process runs for a training."""
NICENESS = 10
"""Niceness of the planning process, which is ahead of training: it runs while ranks leave a core idle. A rank that waits for a
plan leaves its own.
"""
PROCESS_RESTARTS = 3
"""Times that a planning process which has ended is started again for one batch; memory may have been short for a while. Not
measured: with 0 one such moment ends the training, with many a fault that repeats is told late.
"""


class PlanningProcess:
    """A process that a run asks, from any thread, one call at a time. It is started again where it has ended."""

    def __init__(self) -> None:
        self._worker = Worker(NICENESS)
        self._is_closed = False
        self._lock, self._exchange = threading.Lock(), threading.Lock()

    def prepare(self, options: Options) -> None:
        """Have it load what it needs to plan with some options, without waiting for it."""
        with self._lock, contextlib.suppress(EndedError):  # the next call starts it again
            self._worker.send(f"{_ANSWERS}:load", options)

    def call(self, name: str, *args: Any) -> Any:
        """Return or raise what ``module:function`` does there, or a `WorkerError` if the process is closed or keeps ending."""
        with self._lock:
            for restarts_left in range(PROCESS_RESTARTS, -1, -1):
                try:
                    return self._worker.call(name, *args)
                except EndedError as ended:
                    if not (restarts_left and self._restarted(ended)):
                        raise
        raise AssertionError("the last restart returns or raises")

    def _restarted(self, ended: EndedError) -> bool:
        with self._exchange:
            if self._is_closed:
                return False
            logger.warning("%s; it is started again, and plans as before", ended)
            self._worker.close()
            self._worker = Worker(NICENESS)
            return True

    def plan_microbatches(
        self, rule: str, microbatches: MicrobatchLengths, problem: Problem, costs: Costs, options: Options
    ) -> tuple[PackedPlan, tuple[int, ...]]:
        """Return the plan by a function of `planner.microbatches`, and the microbatch of each of its chunks."""
        plan, order = self.call("megatron_epp.planner.microbatches:packed", rule, microbatches, problem, costs, options)
        return plan, order

    def close(self) -> None:
        """End the process. A thread that waits for an answer gets a `WorkerError`."""
        with self._exchange:
            self._is_closed = True
            self._worker.close()


class BatchPlanner(Protocol):
    """Plans the batches of a run, one after the other."""

    def plan(self, problem: Problem, *, is_run: bool = True) -> PackedPlans: ...

    def of_next(self) -> Callable[[Problem], PackedPlans]:
        """Return the function that plans the next training batch by the costs known now: unlike `plan` it waits for none."""


@dataclass(slots=True)
class BackgroundPlanner:
    """Plans the batches of one run for a group of its replicas.

    Equal problems get equal plans, on every machine and after a resume, and so an equal division over replicas.
    """

    costs: Costs
    options: Options
    lockstep_group: int = 0  # index in `lockstep_groups` of the group to plan for
    # All replicas that share a batch. Replicas of a group share experts and get lockstep plans.
    lockstep_groups: LockstepGroups = ((0,),)
    process: PlanningProcess = field(default_factory=PlanningProcess)  # that plans; it may plan for others, too
    tells_peak: bool = True  # the first plan that runs says what its peak is made of

    def plan(self, problem: Problem, grain: float = 1.0, *, is_run: bool = True) -> PackedPlans:
        """Plan the shares that the group's replicas have of a batch, in their order. Raises what `planner.plan` raises.

        With `is_run` False it is only asked whether there is a plan. `grain` is the chunks, or of planners that know slices
        alone those of the longest sequence, as a multiple of the fastest plan's, where the planner chooses and that fits.
        """
        tells_peak = self.tells_peak and is_run and not problem.forward_only
        self.tells_peak &= not tells_peak
        groups = self.lockstep_group, self.lockstep_groups
        name = f"{_ANSWERS}:plans_of_batch"
        plans: PackedPlans = self.process.call(name, problem, self.costs, self.options, *groups, grain)
        if tells_peak:
            plans = self.process.call("megatron_epp.planner.memory.breakdown:with_peak_items", plans, self.costs)
        return plans

    def of_next(self) -> Callable[[Problem], PackedPlans]:
        return self.plan
