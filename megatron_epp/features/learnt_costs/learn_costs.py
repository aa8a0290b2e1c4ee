"""Costs that a training learns from its first iterations, and the batch from which plans made ahead of it use them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_epp.cost.kept import FILE_NAME, RECORDED, WARM_UP, KeptCosts, to_state
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import span_work
from megatron_epp.features.learnt_costs.learner import Learner, deviation, fitted_costs, size_of, untold
from megatron_epp.features.learnt_costs.learnt import fingerprint, resumed, with_times
from megatron_epp.features.learnt_costs.timed import Learnt
from megatron_epp.mcore.costs.stored import keep_file
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.problem import Problem, Spans
from megatron_epp.port.packed import PackedPlans
from megatron_epp.port.planning import BackgroundPlanner, BatchPlanner
from megatron_epp.runtime.links.objects import from_each_of_job, made_by_first
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.side_thread import SideThread

if TYPE_CHECKING:
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

_ITERATIONS = WARM_UP + RECORDED

_GRAINS = {WARM_UP: 0.5, WARM_UP + 2: 0.5, WARM_UP + 3: 3.0}
"""Chunks of batches, by number from 1, as a multiple of the fastest plan's. From chunks of one grain, which take equal time, no
fit can tell a pass's fixed time from a token's or a pair's (`timed`). With twice as many instead of three times 4 to 7 chunks
did not tell the fixed time. They cost 3 to 12 % of an iteration, once. The last batch that is not recorded has the largest
chunks, too: where memory of such a size is new, passes took twice as long on a CPU."""


class CostLearning(RunFeature):
    """Measures the first training iterations of a run, which are planned by formulas, and fits costs to them, unless an earlier
    run of the same model has.
    """

    reads_times = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self.learner = Learner(learnt=Learnt(pipeline=run.links.ranks[0]))
        self.saved: KeptCosts | None = None
        self._learnt_with: dict[str, Any] = {}
        """Flags and model that learnt costs depend on."""
        self._seen = 0
        self._plan: Plan | None = None  # of the last recorded iteration
        self._planner: LearntPlanner | None = None  # on a rank that plans, while costs are learnt
        self._thread = SideThread("epp-cost-learning")  # reads times only: `_fit`, a collective, is in the training thread
        self._added: Future[None] | None = None  # of the last iteration

    @property
    def is_recording(self) -> bool:
        """True if the next training iteration is measured: the first `WARM_UP` compile kernels and allocate memory."""
        return WARM_UP <= self._seen < _ITERATIONS

    @property
    def is_done(self) -> bool:
        return self._seen >= _ITERATIONS

    @property
    def peak_bytes(self) -> int:
        return self.learner.learnt.peak_bytes

    def costs(self, prior: PipelineCosts) -> PipelineCosts:
        """Return costs that an earlier run has learnt, if it was like this one. A collective call of all ranks."""
        run, models = self._run, {number: stage.model for number, stage in self._run.stages.items()}
        self._learnt_with = fingerprint(run.args, models, run.links)
        known = made_by_first(lambda: resumed(run.args, run.loaded_costs, self._learnt_with))
        if known is None:
            return prior
        self._seen = _ITERATIONS
        self._keep(known)  # this run may save to another folder
        return with_times(prior, known) if run.makes_chunks else known

    def planner(self, planner: BatchPlanner) -> BatchPlanner:
        if not self.is_done:
            assert isinstance(planner, BackgroundPlanner)
            planner = self._planner = LearntPlanner(planner, self._run.args.epp_lookahead)
        return planner

    def after(self, plan: Plan | None, recorder: Recorder, measured: Callable[[], Mapping[str, Any]]) -> None:
        """Add a training iteration, and fit costs after the last one that is measured, in a collective call.

        Times are read in a thread while the next iteration runs; only the last iteration waits for them.
        """
        if self._added is not None:
            self._added.result()  # raises the error with which it ended
        if self.is_done:
            return
        is_recording = self.is_recording
        self._seen += 1
        if plan is None or not is_recording:
            self.learner.skip()
        else:
            self._plan = plan
            self._added = self._thread.submit(partial(self._add, plan, recorder, self._known(plan, **measured())))
        if self.is_done:
            if self._added is not None:
                self._added.result()
            self._fit()

    def _known(self, plan: Plan, spans: Sequence[Spans] = (), **known: Any) -> dict[str, Any]:
        """Return keywords of `Learner.add`: in place of spans, tokens that take the first stage as long as a chunk's."""
        if spans:
            layers = max(1, self._run.costs.num_layers[0])
            known["span_tokens"] = lambda chunk: (
                sum(span_work(spans[q], *ends) for q, *ends in plan.chunks[chunk].segments) / layers
            )
        return known

    def _add(self, plan: Plan, recorder: Recorder, measured: Mapping[str, Any]) -> None:
        """Record an iteration. On a GPU this waits for the device."""
        measured = {"kept_bytes": {}, "collectives": recorder.collectives(), **measured}
        self.learner.add(plan, recorder.events(), **measured)

    def _fit(self) -> None:
        """Fit costs to what all ranks have recorded, keep them with checkpoints, and plan by them."""
        run, before, everyone = self._run, self._run.costs, from_each_of_job(self.learner.learnt)
        costs = run.completed(made_by_first(lambda: fitted_costs(before, everyone, keeps_weights=run.makes_chunks)))
        if dist.get_rank() == 0 and (plan := self._plan) is not None:
            ratio = deviation(before, costs, [size_of(plan, chunk) for chunk in range(len(plan.chunks))])
            stays, note = ", ".join(untold(before, everyone)), ""
            stays = stays and f"; these batches do not tell, so the ratio is that of formulas: {stays}"
            if run.makes_chunks:
                note = f"; plans are made from these costs from batch {first_batch(run.args.epp_lookahead)} on"
            logger.info("costs learnt from %d iterations: they took %s%s%s", RECORDED, ratio, stays, note)
        self._keep(costs)
        run.plan_by(costs)
        if self._planner is not None:
            self._planner.plan_with(run.planner_by(costs))

    def _keep(self, costs: PipelineCosts) -> None:
        self.saved = KeptCosts(costs, self._learnt_with)
        keep_file(self._run.args, FILE_NAME, json.dumps(to_state([self.saved]), sort_keys=True, indent=1, allow_nan=False))

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()


def first_batch(lookahead: int) -> int:
    """Return the number from 1 of the first batch that is planned by learnt costs.

    It is the same batch in every run, so that all ranks that plan ahead, one of every group of replicas, have equal costs.
    """
    return _ITERATIONS + lookahead + 1


class LearntPlanner:
    """Planner of every batch: by formulas first, and training batches from `first_batch` on by learnt costs, which waits for
    them. Evaluations stay with formulas: they follow no iteration.
    """

    def __init__(self, by_formula: BackgroundPlanner, lookahead: int) -> None:
        self._by_formula, self._first_batch = by_formula, first_batch(lookahead)
        self._batch = 0  # the last that was planned
        self._planner: BackgroundPlanner | None = None
        self._is_over = threading.Event()

    def plan_with(self, planner: BackgroundPlanner) -> None:
        self._planner = planner
        self._is_over.set()

    def plan(self, problem: Problem, *, is_run: bool = True) -> PackedPlans:
        """Plan the next batch, when the costs for it are there. Raises `EppError` if training ends meanwhile, and what planning
        raises.
        """
        if problem.forward_only or not is_run:
            return self._by_formula.plan(problem, is_run=is_run)
        self._batch += 1
        if self._batch < self._first_batch:
            return self._by_formula.plan(problem, _GRAINS.get(self._batch, 1.0))
        self._is_over.wait()
        if self._planner is None:
            raise EppError("training has ended before costs were learnt")
        return self._planner.plan(problem)

    def of_next(self) -> Callable[[Problem], PackedPlans]:
        """Return what plans the next training batch by what is learnt now. For calls in the training thread, in which all ranks
        learn costs at the same call.
        """
        self._batch += 1
        if self._planner is not None:
            return self._planner.plan
        return partial(self._by_formula.plan, grain=_GRAINS.get(self._batch, 1.0))

    def close(self) -> None:
        """End planning. A thread that waits for learnt costs gets an error."""
        self._is_over.set()
