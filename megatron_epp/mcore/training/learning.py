"""Costs that our own loop learns from its first training iterations, and the batch from which plans are made by them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.learning import RECORDED, WARM_UP, Learner, OutputShare
from megatron_epp.cost.timed import Learnt
from megatron_epp.plan import EppError, Plan
from megatron_epp.planner.service.background import BackgroundPlanner
from megatron_epp.runtime.side_thread import SideThread
from megatron_epp.runtime.trace import Recorder


class CostLearning:
    """Measures the first training iterations of a run, which are planned by formulas, and fits costs to them.

    Batches are planned ahead of training, on one rank of every group of replicas. So that all plan with equal costs, learnt
    costs are used from `first_batch` on, the same in every run; its planning waits until costs are learnt.

    Args:
        pipeline: any number that the ranks of this rank's pipeline have in common, and no others.
        fit: `Run.fit`.
    """

    def __init__(self, lookahead: int, pipeline: int, fit: Callable[..., PipelineCosts]) -> None:
        self.learner = Learner(learnt=Learnt(pipeline=pipeline))
        self.first_batch = WARM_UP + RECORDED + lookahead + 1
        """Number of the first training batch that is planned by learnt costs, from 1."""
        self._fit = fit
        self._batch = 0  # the last that was planned
        self._planner: BackgroundPlanner | None = None
        self._is_over = threading.Event()
        self._thread = SideThread("epp-cost-learning")  # reads times only: `fit`, a collective, is in the training thread
        self._added: Future[None] | None = None  # of the last iteration

    def after(self, plan: Plan, recorder: Recorder, output_share: OutputShare | None = None) -> PipelineCosts | None:
        """Add a training iteration; return the learnt costs after the last one that is measured, in a collective call.

        Its times are read in a thread while the next iteration runs. Only the last iteration waits for its times, since the
        plan of a certain batch is made by what was learnt.

        Args:
            output_share: of its chunks, on a rank with the output layer or a shard of it.
        """
        if self._added is not None:
            self._added.result()  # raises the error with which it ended
        if self.learner.is_done:
            return None
        is_last = self.learner.seen == WARM_UP + RECORDED - 1
        self._added = self._thread.submit(partial(self._add, plan, recorder, output_share))
        if not is_last:
            return None
        self._added.result()
        told = f"; plans are made from these costs from batch {self.first_batch} on"
        return self._fit(self.learner, plan, keeps_weights=True, told=told)

    def _add(self, plan: Plan, recorder: Recorder, output_share: OutputShare | None) -> None:
        """Record an iteration. On a GPU this waits for the device."""
        if not self.learner.is_recording:  # the first `WARM_UP` iterations compile kernels and allocate memory
            self.learner.add(plan, (), {})
            return
        collectives = recorder.collectives()
        self.learner.add(plan, recorder.events(), {}, output_share=output_share, collectives=collectives)

    def plan_with(self, planner: BackgroundPlanner) -> None:
        """Set the planner that has learnt costs; only on a rank that plans."""
        self._planner = planner
        self._is_over.set()

    def planner_of_next(self, by_formula: BackgroundPlanner) -> BackgroundPlanner:
        """Return the planner of the next training batch: `by_formula`, or from `first_batch` on the one with learnt costs.

        Waits until costs are learnt. Raises `EppError` if training ends meanwhile.
        """
        self._batch += 1
        if self._batch < self.first_batch:
            return by_formula
        self._is_over.wait()
        if self._planner is None:
            raise EppError("training has ended before costs were learnt")
        return self._planner

    def close(self) -> None:
        """End planning. A thread that waits for learnt costs gets an error."""
        self._is_over.set()
        if self._planner is not None:
            self._planner.close()
