"""State of a training on documents that persists across iterations: stages, and the planner that makes plans from lengths."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.work import span_work_of
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.iterator import DisagreementError, PlansOrError, PlanSource, spans_of
from megatron_epp.features import targets
from megatron_epp.mcore import early_planning
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.costs.sources import Step, pipeline_costs
from megatron_epp.mcore.costs.stored import with_times
from megatron_epp.mcore.iteration.base_run import Run, lockstep_groups
from megatron_epp.mcore.iteration.device_inputs import PreparedBatch, RankInputs, rank_inputs
from megatron_epp.mcore.iteration.learn_costs import CostLearning, LearntPlanner
from megatron_epp.mcore.model import rotary
from megatron_epp.mcore.model.adopt import check_adopted
from megatron_epp.mcore.model.block_loss import block_loss
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.model.stage import HeadSettings, MegatronStage
from megatron_epp.mcore.patches import fingerprints, patching
from megatron_epp.mcore.training.caps import offloads, possible_on_device
from megatron_epp.plan import Action, EppError, InfeasibleError, is_unlimited
from megatron_epp.plan.problem import Lengths, Problem
from megatron_epp.port.packed import PackedPlans
from megatron_epp.port.planning import BackgroundPlanner, PlanningProcess
from megatron_epp.runtime.links.objects import ObjectGroup, agreed
from megatron_epp.runtime.recorder import Recorder

logger = logging.getLogger(__name__)

_LONGEST = 8
"""Number of lengths that an error message lists."""


class SlicedRun(Run):
    """One process's share of a training on documents.

    In the background, one rank of every lockstep group plans the group's shares of the global batch, which all these ranks
    divide from the same lengths, costs and caps. It is created before the data iterators, whose plans wait until `attach` has
    the model's costs.
    """

    stages: dict[int, MegatronStage]
    learning: CostLearning | None = None
    """Costs that the run learns; None before `attach`, without `--epp-costs learn`, and if an earlier run has learnt them."""
    learnt_planner: LearntPlanner | None = None
    inputs: RankInputs | None = None
    """Upload of batches to this rank's device; None before `attach`."""
    untrained_batches = 0
    longest_tokens = 0
    """Tokens of the longest sequence of the training data, on one planning rank until it has looked for a plan; else 0."""

    _process: PlanningProcess | None = None
    _planner: BackgroundPlanner | None = None
    _planning_ranks: ObjectGroup | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.plans = dist.get_rank() == self.own_ranks[0]
        """The first rank of a group plans."""
        self.loss = None if args.epp_loss is None else resolve_name("megatron_epp.losses:load_loss")(args.epp_loss)
        self._process = early_planning.take() if self.plans and args.epp_schedule == "elastic" else None
        # Set by the training thread in `attach`. The thread of the data iterators waits for it with the first batch.
        self._can_plan = threading.Event()

    def attach(self, models: Sequence[torch.nn.Module], config: Any) -> None:
        """Wrap the rank's model chunks as stages and settle costs and caps, at the first call; later calls do nothing."""
        if self.stages:
            return
        stages = agreed(partial(self._stages_of, models, config), self.names)
        # From here on groups are made. torch makes each on all ranks of the job, so the order of these calls must not depend on
        # the rank.
        self.connect(stages)
        self.inputs = rank_inputs(self.stages, next((feature.rows_of for feature in self.features if feature.rows_of), None))
        self._planning_ranks = ObjectGroup.create([ranks[0] for ranks in self.lockstep_ranks], self.groups)
        if self.args.epp_schedule == "elastic":
            self.use_communicators()  # ahead of `settle`, whose caps then count their memory
            learns = self.args.epp_costs == "learn"
            self.settle(self._prior, learns, resume=with_times)
            assert self.costs is not None
            if learns and self.saved_costs is None:
                self.learnt_planner = LearntPlanner(self.args.epp_lookahead)
                note = f"; plans are made from these costs from batch {self.learnt_planner.first_batch} on"
                self.learning = CostLearning(partial(self.fit, keeps_weights=True, note=note), self.links.ranks[0])
            if self.plans:
                assert self.costs is not None  # since `settle`
                self._planner = self._planner_by(self.costs)
                self._can_plan.set()

    def _stages_of(self, models: Sequence[torch.nn.Module], config: Any) -> dict[int, MegatronStage]:
        """Return the rank's model chunks as stages. Raises `EppError` for a model that cannot run in slices."""
        if self.args.epp_schedule != "stock":
            for model in models:
                check_adopted(model)
                rotary.adopt(language_model_of(model))  # when the program has built it: it may have put its own there
        head = HeadSettings(MegatronStage)
        for change in targets(self.asked, "head"):
            change(self, models, head)
        last = self.placement.num_stages - 1
        return {
            stage: (head.make if stage == last else MegatronStage)(
                model,
                config,
                is_first=stage == 0,
                is_last=stage == last,
                tp_size=mpu.get_tensor_model_parallel_world_size(),
                fp32_kv_gradients=self.args.epp_fp32_kv_gradients,
                block_loss=block_loss(self.args, language_model_of(model), head.asked)
                if head.has_head and stage == last
                else None,
                own_inputs=self.own_inputs if stage == 0 else None,
            )
            for stage, model in zip(self.placement.stages(self.rank), models, strict=True)
        }

    def _prior(self, note: Callable[[Step], None]) -> PipelineCosts:
        """Return costs by formula or from a file, with measured bytes; `note` is called with each step before it starts."""
        with ExitStack() as measuring:
            for feature in self.features:
                measuring.enter_context(feature.measuring())
            own = self.args, self.stages, self.links, self.placement.num_stages, self.ask
            return pipeline_costs(*own, self.measured, note)

    def after(self, batch: GlobalBatch, recorder: Recorder) -> None:
        """Learn costs from a training iteration, and compare it with its plan; in some, a collective call of all ranks."""
        plan, last = batch.plan, self.stages.get(self.placement.num_stages - 1)
        assert plan is not None
        has_output = (last is not None and last.has_loss) or any(feature.rows_of for feature in self.features)
        inputs = batch.prepared.inputs
        share = (lambda chunk: inputs.chunk(chunk).output_share) if has_output else None
        spans = () if self.learning is None else spans_of(batch.dataset, batch.indices)
        layers = 1 if self.costs is None else max(1, self.costs.num_layers[0])
        span_tokens = (lambda chunk: span_work_of(plan.chunks[chunk], spans) / layers) if spans else None
        with self.watching("waits for others' times"):
            learnt = None if self.learning is None else self.learning.after(plan, recorder, share, span_tokens=span_tokens)
            if learnt is not None and self.plans and self.learnt_planner is not None:
                self.learnt_planner.plan_with(self._planner_by(learnt))
            if self.watch is not None and self.costs is not None and plan.costs == self.costs.name:
                self.watch.after(plan, recorder)

    def ask(self, name: str, *args: Any) -> Any:
        assert self._process is not None  # the first rank has one
        return self._process.call(name, *args)

    def _planner_by(self, costs: PipelineCosts) -> BackgroundPlanner:
        assert self._process is not None  # this rank plans
        options = options_from(self.args, training=True, offload=offloads(self.args))
        is_first = self._planner is None  # which tells its peak, once for a run
        return BackgroundPlanner(costs, options, self.lockstep_group, self.lockstep_groups, self._process, is_first)

    def plan_source(self, forward_only: bool, *, of_batch: bool = False) -> PlanSource:
        """Return the source of this rank's plans. With `of_batch` it plans a single batch, and is made in the training thread;
        otherwise one batch after the other.
        """
        plan = None
        if of_batch and self.learnt_planner is not None and self._planner is not None and not forward_only:
            plan = self.learnt_planner.of_next(self._planner)
        make = partial(self._plan, forward_only=forward_only, plan=plan) if self.plans else None
        member = self.lockstep_groups[self.lockstep_group].index(self.replica)
        return PlanSource(make, self._exchange_plans, member, self._check_division, self.rank, self._prepare)

    def close(self) -> None:
        """Wait for the work of background threads, and end planning. A thread that still waits for a plan gets an error."""
        try:
            super().close()
        finally:
            for planning in (self._process, self.learnt_planner):
                if planning is not None:
                    planning.close()

    def _plan(self, batch: Lengths, *, forward_only: bool, plan: Callable[[Problem], PackedPlans] | None = None) -> PackedPlans:
        self._can_plan.wait()
        assert self._planner is not None
        if self.longest_tokens and not forward_only:
            self._warn_of_longest(self._planner)
        problem = replace(self.problem, **batch._asdict(), forward_only=forward_only)
        try:
            if plan is not None:
                return plan(problem)
            if self.learnt_planner is None or forward_only:  # evaluations stay with formulas: they follow no iteration
                return self._planner.plan(problem)
            return self.learnt_planner.plan_next(self._planner, problem)
        except EppError as error:
            raise possible_on_device(error).with_context(
                after=f"\nThe batch that this is about has {_summary(batch.lengths)}.", names=self.names
            ) from error

    def _warn_of_longest(self, planner: BackgroundPlanner) -> None:
        """Warn once if no plan fits the longest sequence: the run would end when it comes, perhaps after days."""
        longest, self.longest_tokens = self.longest_tokens, 0
        if is_unlimited(min(self.problem.cap_bytes)):
            return
        try:
            planner.plan(replace(self.problem, lengths=(longest,) * self.replicas), is_run=False)
        except InfeasibleError as error:
            text = possible_on_device(error).text(self.names)
            logger.warning(
                "the longest sequence of the training data, of %d tokens, will end the run when it comes: %s", longest, text
            )

    def _prepare(self, batch: GlobalBatch, actions: tuple[Action, ...]) -> PreparedBatch:
        assert self.inputs is not None  # batches are taken after `attach`
        return self.inputs.prepare(batch, actions)

    def _exchange_plans(self, plans: list[PlansOrError]) -> list[PlansOrError]:
        return self.links.control.from_first(plans)  # in the training thread, like all that uses `control`

    def _check_division(self, checksum: int | None) -> None:
        if not self.plans or len(self.lockstep_groups) == 1:
            return
        assert self._planning_ranks is not None
        checksums = self._planning_ranks.from_each(checksum)
        if None in checksums and checksum is not None:
            raise DisagreementError("another replica has no plan for its share of a batch; its own error says why")
        if None not in checksums and len(set(checksums)) > 1:
            raise DisagreementError(
                f"replicas divide a batch differently (checksums {checksums}). All need the same data, seed, software and costs"
            )


def _summary(lengths: tuple[int, ...]) -> str:
    """Describe lengths: ``8 sequences of 39 to 7,172 tokens, 12,345 in all, the longest 7172, 3001, 988``."""
    longest = ", ".join(map(str, sorted(lengths, reverse=True)[:_LONGEST]))
    spread = f"{min(lengths, default=0):,} to {max(lengths, default=0):,} tokens"
    return f"{len(lengths)} sequences of {spread}, {sum(lengths):,} in all, the longest {longest}"


_run: SlicedRun | None = None


def prepare(args: argparse.Namespace) -> None:
    """Start the planning process, before the model is built. A collective call of all ranks."""
    _, ranks = lockstep_groups()
    if args.epp_schedule == "elastic" and dist.get_rank() in {lockstep_ranks[0] for lockstep_ranks in ranks}:
        early_planning.start(options_from(args, training=True, offload=offloads(args)))


def start(args: argparse.Namespace) -> SlicedRun:
    """Create the process's run on documents. A previous one, if any, ends."""
    global _run
    end()
    strange = patching.unknown(fingerprints.RELIED_ON) if args.rank == 0 else []
    if strange:
        logger.warning("this Megatron is not as megatron-epp was tested with: look at its %s", ", ".join(strange))
    _run = SlicedRun(args)
    return _run


def end() -> None:
    global _run
    if _run is not None:
        _run.close()
    _run = None
    early_planning.end()


def current() -> SlicedRun:
    """Raises `EppError` if `start` was not called."""
    if _run is None:
        raise EppError("no elastic run was started: train through megatron.training.pretrain with --epp")
    return _run
