"""Plans for training, made in a process beside it: planning takes no time from the interpreter that launches the kernels."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from megatron_epp import planner
from megatron_epp.cost import Costs
from megatron_epp.planner.anytime import Anytime
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.refine import Refiner
from megatron_epp.planner.worker import Worker
from megatron_epp.schedule import Plan
from megatron_epp.schedule.serialize import pack

KEPT = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context."""


class PackedPlan(NamedTuple):
    """A plan as `schedule.serialize.pack` writes it, and how long it took to make."""

    message: bytes
    planning_us: float


class BackgroundPlanner:
    """Plans the batches of one run, from any thread, one at a time.

    Without a budget and with any planner but "milp", equal problems get equal plans, on every machine and after a resume.
    """

    def __init__(self, costs: Costs, options: Options) -> None:
        self._worker = Worker(_planning, costs, options)
        self._lock = threading.Lock()

    def plan(self, problem: Problem) -> PackedPlan:
        """Raises what `planner.plan` raises, and `WorkerError` when the process has ended."""
        with self._lock:
            packed: PackedPlan = self._worker.call(problem)
        return packed

    def close(self) -> None:
        """End the process. A thread that waits for a plan gets a `WorkerError`."""
        self._worker.close()


def _planning(costs: Costs, options: Options) -> Callable[[Problem], PackedPlan]:
    """What the process runs for every batch."""
    if options.planner == "milp":
        return functools.partial(_packed, Refiner(costs, options).plan)
    if options.budget_ms:
        return functools.partial(_packed, Anytime(costs, options).plan)
    return functools.partial(_packed, functools.lru_cache(KEPT)(lambda problem: planner.plan(problem, costs, options)))


def _packed(plan: Callable[[Problem], Plan], problem: Problem) -> PackedPlan:
    start_s = time.perf_counter()
    made = plan(problem)
    planning_us = (time.perf_counter() - start_s) * 1e6
    return PackedPlan(pack(made), planning_us)
