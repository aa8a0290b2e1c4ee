"""Planning in a process of its own: it takes no time from the interpreter that launches the kernels."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import Any

from megatron_epp.cost import Costs
from megatron_epp.plan.problem import LockstepGroups, Options, Problem
from megatron_epp.port.packed import MicrobatchLengths, PackedPlan, PackedPlans
from megatron_epp.port.worker import EndedError, Worker

logger = logging.getLogger(__name__)

_ANSWERS = "megatron_epp.planner.service.answers"
"""Module with what the process runs."""
NICENESS = 10
"""Niceness of the planning process, which is ahead of training: it runs while ranks leave a core idle. A rank that waits for a
plan leaves its own.
"""
PROCESS_RESTARTS = 3
"""Times that a planning process which has ended is started again for one batch; memory may have been short for a while. Not
measured: with 0 one such moment ends the training, with many a fault that repeats is told late.
"""


class PlanningProcess:
    """A process that plans the batches of one run, from any thread, one at a time.

    Args:
        make: name of what makes the function that the process calls for every batch (`Worker`), given `args`.
        process: of `start_early`, which is used and ended; None to start one.
    """

    def __init__(self, make: str, *args: Any, process: Worker | None = None) -> None:
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
        super().__init__(f"{_ANSWERS}:planning", costs, options, lockstep_group, lockstep_groups, process=process)

    def plan(self, problem: Problem, grain: float = 1.0, *, is_run: bool = True) -> PackedPlans:
        """Plan the shares that the group's replicas have of a batch, in their order. Raises what `planner.plan` raises.

        Args:
            grain: slices of the longest sequence, as a multiple of the fastest plan's. It counts where the planner chooses the
                slices and a plan with these fits.
            is_run: False to only know whether there is a plan.
        """
        plans: PackedPlans = self.call(problem, grain, is_run)
        return plans


class MicrobatchPlanner(PlanningProcess):
    """Plans whole microbatches of a caller."""

    def __init__(self) -> None:
        super().__init__(f"{_ANSWERS}:microbatch_planning")

    def plan(
        self, rule: str, microbatches: MicrobatchLengths, problem: Problem, costs: Costs, options: Options
    ) -> tuple[PackedPlan, tuple[int, ...]]:
        """Return the plan by a function of `planner.microbatches`, and the microbatch of each of its chunks."""
        plan, order = self.call(rule, microbatches, problem, costs, options)
        return plan, order


def start_early(options: Options) -> Worker:
    """Start a planning process before there are costs: it loads what it needs for some options while there is no model yet."""
    return Worker(f"{_ANSWERS}:load", options, niceness=NICENESS)
