"""Costs that a training learns from its first iterations, and the batch from which plans made ahead of it use them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.learning import RECORDED, WARM_UP, Learner, OutputShare
from megatron_epp.cost.timed import Learnt
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.problem import Problem
from megatron_epp.port.packed import PackedPlans
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.side_thread import SideThread

_ITERATIONS = WARM_UP + RECORDED

_GRAINS = {WARM_UP + 2: 0.5, WARM_UP + 3: 2.0}
"""Slices of recorded batches, by number from 1, as a multiple of the fastest plan's. From slices of one grain, which take equal
time, no fit can tell a pass's fixed time from a token's or a pair's (`cost.timed`). They cost a few percent, once."""


class CostLearning:
    """Measures the first training iterations of a run, which are planned by formulas, and fits costs to them.

    Args:
        fit: fits costs to what ranks have recorded, given the plan of the last recorded iteration (`Run.fit`).
        pipeline: a number that the ranks of this rank's pipeline have in common, and no others.
    """

    def __init__(self, fit: Callable[[Learner, Plan | None], PipelineCosts], pipeline: int = 0, is_done: bool = False) -> None:
        self.learner = Learner(learnt=Learnt(pipeline=pipeline))
        self._fit = fit
        self._seen = _ITERATIONS if is_done else 0
        self._plan: Plan | None = None
        self._thread = SideThread("epp-cost-learning")  # reads times only: `fit`, a collective, is in the training thread
        self._added: Future[None] | None = None  # of the last iteration

    @property
    def is_recording(self) -> bool:
        """True if the next training iteration is measured: the first `WARM_UP` compile kernels and allocate memory."""
        return WARM_UP <= self._seen < _ITERATIONS

    @property
    def is_done(self) -> bool:
        return self._seen >= _ITERATIONS

    def after(
        self, plan: Plan | None, recorder: Recorder, output_share: OutputShare | None = None, **measured: Any
    ) -> PipelineCosts | None:
        """Add a training iteration; return the learnt costs after the last one that is measured, in a collective call.

        Times are read in a thread while the next iteration runs; only the last iteration waits for them. `plan` is None if this
        rank's replica ran nothing, and `output_share` of its chunks, on a rank with the output layer or a shard of it.
        `measured` is what else `Learner.add` takes.
        """
        if self._added is not None:
            self._added.result()  # raises the error with which it ended
        if self.is_done:
            return None
        is_recording = self.is_recording
        self._seen += 1
        if plan is None:
            self.learner.skip()
        else:
            self._plan = plan if is_recording else self._plan
            self._added = self._thread.submit(
                partial(self._add, plan, recorder if is_recording else None, output_share, measured)
            )
        if not self.is_done:
            return None
        if self._added is not None:
            self._added.result()
        return self._fit(self.learner, self._plan)

    def _add(self, plan: Plan, recorder: Recorder | None, output_share: OutputShare | None, measured: dict[str, Any]) -> None:
        """Record an iteration. On a GPU this waits for the device."""
        if recorder is None:
            self.learner.add(plan, (), {})
            return
        collectives = recorder.collectives()
        measured = {"kept_bytes": {}} | measured
        self.learner.add(plan, recorder.events(), output_share=output_share, collectives=collectives, **measured)


class LearntPlanner:
    """Planner of every training batch: by formulas first, and by learnt costs from `first_batch` on, which waits for them.

    It is the same batch in every run, so that all ranks that plan ahead, one of every group of replicas, have equal costs.
    """

    def __init__(self, lookahead: int) -> None:
        self.first_batch = _ITERATIONS + lookahead + 1
        """The number from 1."""
        self._batch = 0  # the last that was planned
        self._planner: BackgroundPlanner | None = None
        self._is_over = threading.Event()

    def plan_with(self, planner: BackgroundPlanner) -> None:
        """Set the planner that has learnt costs; only on a rank that plans."""
        self._planner = planner
        self._is_over.set()

    def plan_next(self, by_formula: BackgroundPlanner, problem: Problem) -> PackedPlans:
        """Plan the next training batch: with `by_formula`, or from `first_batch` on with learnt costs, when these are there.
        Raises `EppError` if training ends meanwhile, and what planning raises.
        """
        self._batch += 1
        if self._batch < self.first_batch:
            return by_formula.plan(problem, _GRAINS.get(self._batch, 1.0))
        self._is_over.wait()
        if self._planner is None:
            raise EppError("training has ended before costs were learnt")
        return self._planner.plan(problem)

    def of_next(self, by_formula: BackgroundPlanner) -> Callable[[Problem], PackedPlans]:
        """Return what plans the next training batch by what is learnt now, without waiting. For calls in the training thread,
        in which all ranks learn costs at the same call.
        """
        self._batch += 1
        if self._planner is not None:
            return self._planner.plan
        return partial(by_formula.plan, grain=_GRAINS.get(self._batch, 1.0))

    def close(self) -> None:
        """End planning. A thread that waits for learnt costs gets an error."""
        self._is_over.set()
