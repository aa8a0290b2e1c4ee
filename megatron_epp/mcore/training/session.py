"""State that persists across iterations: costs, communicators, stages, and the planner that makes plans from lengths."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.kept import KeptCosts
from megatron_epp.cost.work import TrainedParts
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.iterator import DisagreementError, Item, PlanSource
from megatron_epp.launch.run_folder import hold, new_run_id
from megatron_epp.mcore.arguments.consequences import placement_of, token_multiple
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.arguments.vocabulary import shards_vocabulary
from megatron_epp.mcore.costs.learnt import fingerprint, keep, resumed
from megatron_epp.mcore.costs.sources import gathered, pipeline_costs
from megatron_epp.mcore.costs.stored import with_times
from megatron_epp.mcore.costs.watch import StageWatch
from megatron_epp.mcore.model.adopt import check_adopted
from megatron_epp.mcore.model.block_loss import block_loss
from megatron_epp.mcore.model.headless_stage import HeadlessStage
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.mcore.patches import fingerprints, patching
from megatron_epp.mcore.training.caps import agreed_caps, host_cap_bytes, possible_on_device
from megatron_epp.mcore.training.communicators import groups_in_use, link_options, reduce_once, time_limit
from megatron_epp.mcore.training.inputs import PreparedBatch, RankInputs, rank_inputs
from megatron_epp.mcore.training.learning import CostLearning
from megatron_epp.mcore.training.reports import ReportFolder, Reports
from megatron_epp.mcore.training.vocabulary import RankVocabulary, rank_vocabulary
from megatron_epp.mcore.training.warm_up import warm_up
from megatron_epp.plan import UNLIMITED_BYTES, Action, EppError
from megatron_epp.plan.ways import ways
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.service.background import BackgroundPlanner, start_early
from megatron_epp.planner.service.packed import PackedPlans
from megatron_epp.planner.service.replica_balance import LockstepGroups, lockstep_groups_of
from megatron_epp.planner.service.worker import Worker
from megatron_epp.runtime.attention.warm_up import WarmUp
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups, ObjectGroup, from_each
from megatron_epp.runtime.offload.host import HostMemory
from megatron_epp.runtime.side_thread import complete_at_end
from megatron_epp.runtime.trace import Recorder
from megatron_epp.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

_LEARNING_STEPS = 7
"""Number of steps in learning costs, in addition to one per stage of a rank for measuring its times."""

_LONGEST = 8
"""Number of lengths that an error message lists."""


class Session:
    """One process's share of an elastic training run.

    Replicas (one per data-parallel rank) that share experts form a group; without expert parallelism every replica is a group
    of its own. One rank of every group plans for all ranks of the group, in the background. It plans the group's shares of the
    global batch, which every planning rank divides on its own from the same lengths, costs and caps. The session is created
    before the data iterators, whose plans wait until `attach` has learned the model's costs. Every rank of the job must create
    its session at the same point.
    """

    learning: CostLearning | None = None
    """Costs that the run learns; None before `attach`, without `--epp-costs learn`, and if an earlier run has learnt them."""
    vocabulary: RankVocabulary | None = None
    """This rank's shard of the output layer; None before `attach`, and if the last stage has all of it."""
    warm_up: WarmUp | None = None
    """Warm-up of this rank's attention; None before `attach`, and if there is nothing to warm up."""
    watch: StageWatch | None = None
    """Comparison of iterations with their plans; None before `attach`, and if times are by formula."""

    _process: Worker | None = None
    """Planning process that is started, for the first planner; None if there is none, or it has it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.iteration = args.iteration
        self.watchdog = Watchdog(args.epp_wait_limit_seconds)
        self.rank = mpu.get_pipeline_model_parallel_rank()
        self.placement = placement_of(args)
        self.replica, self.replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.lockstep_groups, self._lockstep_ranks = lockstep_groups()
        self.lockstep_group = next(
            number for number, lockstep_group in enumerate(self.lockstep_groups) if self.replica in lockstep_group
        )
        self.plans = dist.get_rank() == self._lockstep_ranks[self.lockstep_group][0]
        """True if this rank plans, which is the first rank of its group."""
        self.stages: dict[int, MegatronStage] = {}
        """This rank's stages by their number in the pipeline; empty before `attach`."""
        self.inputs: RankInputs | None = None
        """Upload of batches to this rank's device; None before `attach`."""
        self.links: Links | None = None
        self.untrained_batches = 0
        self.costs: PipelineCosts | None = None
        """Costs of the pipeline; None before `attach`, and if the schedule needs no plans."""
        self.host: HostMemory | None = None
        """Host memory that receives offloaded activations; None without --epp-offload."""
        self.plan_wait_us = 0.0
        """Time spent waiting for the last batch, in microseconds."""
        self.memory_is_told = False
        """True once the parts of the planned peaks have been logged."""
        self.reports = Reports()
        self.report_folder: ReportFolder | None = None
        """Files of --epp-report-dir, on the first rank; None without it."""
        if dist.get_rank() == 0:
            self._hold_folders()
        self.batches_seen: list[tuple[int, ...]] = []
        """Lengths of the first planned batches that were logged, on this replica."""
        self._learning: str | None = None  # the step of learning costs that is under way
        self._problem: Problem | None = None
        self._planner: BackgroundPlanner | None = None
        self._process = _take_process()
        self._can_plan = threading.Event()
        self._planning_ranks: ObjectGroup | None = None

    def _hold_folders(self) -> None:
        """Keep other runs out of the folders that this one writes to. Raises EppError if another run has one of them."""
        run, folder = new_run_id(), self.args.epp_report_dir
        for written in {self.args.save, folder} - {None}:
            hold(written, run)
        if folder is not None:
            self.report_folder = ReportFolder(Path(folder), run, self.args.epp_trace or ())

    def attach(self, models: Sequence[torch.nn.Module], config: Any) -> None:
        """Wrap the rank's model chunks as stages and learn their costs, at the first call; later calls do nothing."""
        if self.stages:
            return
        if self.args.epp_schedule != "stock":
            for model in models:
                check_adopted(model)
        last = self.placement.num_stages - 1
        self.stages = {
            stage: (HeadlessStage if stage == last and shards_vocabulary(self.args) else MegatronStage)(
                model,
                config,
                is_first=stage == 0,
                is_last=stage == last,
                tp_size=mpu.get_tensor_model_parallel_world_size(),
                fp32_kv_gradients=self.args.epp_fp32_kv_gradients,
                block_loss=block_loss(self.args, model) if stage == last and not shards_vocabulary(self.args) else None,
            )
            for stage, model in zip(self.placement.stages(self.rank), models, strict=True)
        }
        pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
        used = ways(self.placement.rank_of)
        groups = Groups(time_limit(self.args), mpu.create_group)
        options = link_options(self.args, used)
        self.reports.connect(groups, self.rank == self.placement.num_ranks - 1)
        self.links = Links.create(pipeline, self._lockstep_ranks[self.lockstep_group], groups, used, options)
        last_rank = self.placement.last_rank
        self.vocabulary = rank_vocabulary(self.args, models, self.stages, config, last_rank, groups, options)
        self.inputs = rank_inputs(self.stages, self.vocabulary)
        self._planning_ranks = ObjectGroup.create([ranks[0] for ranks in self._lockstep_ranks], groups)
        if self.args.epp_schedule == "elastic":
            _, _, device = next(iter(self.stages.values())).message(1)
            with self.watchdog.watch(lambda: f"rank {self.rank} waits for others to meet (--epp-wait-limit-seconds)"):
                self.links.connect(device)
                reduce_once(groups_in_use(self.args), device)
            self.warm_up = warm_up(self.args, self.stages.values(), device)
            offloads = self.args.epp_offload == "on"
            host_cap = host_cap_bytes(self.args) if offloads else UNLIMITED_BYTES
            self._learn_costs(self.links, groups, host_cap)
            self.host = HostMemory(device, host_cap) if offloads else None

    def _learn_costs(self, links: Links, groups: Groups, host_cap: int) -> None:
        """Learn costs and caps from the measurements of all ranks, under a time limit in case a rank never arrives.

        A rank that waits for others does not know their steps, so it waits for the sum of all steps' limits.
        """
        with self.watchdog.watch(self._what_it_learns, lambda: self._learning, self._learning_limit_s()):
            try:
                if self.vocabulary is not None and self.vocabulary.tied is not None:
                    self.vocabulary.tied.gather()  # measurements run the first stage
                self.costs = pipeline_costs(self.args, self.stages, links, self.placement.num_stages, self._note_learning)
                if self.vocabulary is not None and self.vocabulary.tied is not None:
                    self.vocabulary.tied.forget_gradient()
                if self.args.epp_costs == "learn":
                    self._note_learning("looking for learnt costs")
                    self.costs = self._begin_learning(self.costs, links)
                if self.args.epp_costs != "analytic":
                    self.watch = StageWatch(self.rank, ObjectGroup.create(links.control.ranks, groups))
                self._note_learning("exchanging memory caps")
                self._begin_planning(self.costs, agreed_caps(self.args, links.position), gathered(host_cap, links, min))
            finally:
                self._learning = None

    def _begin_learning(self, costs: PipelineCosts, links: Links) -> PipelineCosts:
        """Return `costs` with the times that an earlier run has learnt; learn them if there are none."""
        learnt_with = fingerprint(self.args, {number: stage.model for number, stage in self.stages.items()}, links)
        known = resumed(self.args, (), learnt_with)
        if known is None:
            self.learning = CostLearning(self.args, costs, learnt_with, links.ranks[0])
            return costs
        keep(self.args, KeptCosts(known, learnt_with))  # this run may save to another folder
        return with_times(costs, known)

    @property
    def records(self) -> bool:
        """True if times of a training iteration's actions are needed, whether they are reported or not."""
        return self.watch is not None

    def after(self, batch: GlobalBatch, recorder: Recorder) -> None:
        """Learn from a training iteration, and compare it with its plan; sometimes a collective call of all ranks."""
        plan, last = batch.plan, self.stages.get(self.placement.num_stages - 1)
        assert plan is not None
        has_output = self.vocabulary is not None or (last is not None and last.has_loss)
        inputs = batch.prepared.inputs
        share = (lambda chunk: inputs.chunk(chunk).output_share) if has_output else None
        with self.watchdog.watch(lambda: f"rank {self.rank} waits for others' times (--epp-wait-limit-seconds)"):
            if self.learning is not None and (learnt := self.learning.after(plan, recorder, share)) is not None:
                self.costs = learnt
                if self.plans:
                    self.learning.plan_with(self._planner_by(learnt))
            if self.watch is not None and self.costs is not None and plan.costs == self.costs.name:
                self.watch.after(plan, recorder)

    def _begin_planning(self, costs: PipelineCosts, caps: tuple[int, ...], host_caps: Sequence[int]) -> None:
        """Start the planner with the caps of devices, and the smallest of hosts. Does nothing on a rank that does not plan."""
        if not self.plans:
            return
        assert self._planning_ranks is not None
        host_cap = min(map(min, self._planning_ranks.from_each(host_caps)))
        self._problem = problem_of(self.args, caps, self.placement.rank_of, host_cap)
        self._planner = self._planner_by(costs)
        self._can_plan.set()

    def _planner_by(self, costs: PipelineCosts) -> BackgroundPlanner:
        process, self._process = self._process, None
        options = options_from(self.args, training=True)
        return BackgroundPlanner(costs, options, self.lockstep_group, self.lockstep_groups, process)

    def _note_learning(self, step: str) -> None:
        self._learning = step

    def _learning_limit_s(self) -> float:
        return (_LEARNING_STEPS + len(self.stages)) * self.watchdog.limit_s

    def _what_it_learns(self) -> str:
        steps = _LEARNING_STEPS + len(self.stages)
        return (
            f"rank {self.rank} has been {self._learning} for {self._learning_limit_s():g} s, "
            f"{self.watchdog.limit_s:g} s for each of {steps} steps (--epp-wait-limit-seconds)"
        )

    def plan_source(self, forward_only: bool) -> PlanSource:
        """Return the source of this rank's plans, for training or for evaluation."""
        make = partial(self._plan, forward_only=forward_only) if self.plans else None
        member = self.lockstep_groups[self.lockstep_group].index(self.replica)
        return PlanSource(make, self._exchange, member, self._agree, self.rank, self._prepare)

    def close(self) -> None:
        """Complete what threads do and end planning. Any thread that still waits for a plan gets an error."""
        try:
            complete_at_end(self.reports.complete)
            if self.watch is not None:
                complete_at_end(self.watch.complete)
        finally:
            for planning in (self._planner, self._process):
                if planning is not None:
                    planning.close()
            if self.learning is not None:
                self.learning.close()

    def _plan(self, lengths: tuple[int, ...], trained: tuple[TrainedParts, ...], *, forward_only: bool) -> PackedPlans:
        self._can_plan.wait()
        assert self._planner is not None
        assert self._problem is not None
        planner = self._planner
        if self.learning is not None and not forward_only:  # evaluations stay with formulas: they follow no iteration
            planner = self.learning.planner_of_next(planner)
        try:
            return planner.plan(replace(self._problem, lengths=lengths, forward_only=forward_only, trained=trained))
        except EppError as error:
            raise possible_on_device(error).within(
                after=f"\nThe batch that this is about has {_summary(lengths)}.", names=TRAINING
            ) from error

    def _prepare(self, batch: GlobalBatch, actions: tuple[Action, ...]) -> PreparedBatch:
        assert self.inputs is not None  # batches are taken after `attach`
        return self.inputs.prepare(batch, actions)

    def _exchange(self, items: list[Item]) -> list[Item]:
        assert self.links is not None
        return self.links.control.from_first(items)

    def _agree(self, checksum: int | None) -> None:
        if not self.plans or len(self.lockstep_groups) == 1:
            return
        assert self._planning_ranks is not None
        checksums = self._planning_ranks.from_each(checksum)
        if None in checksums and checksum is not None:
            raise DisagreementError("another replica has no plan for its share of a batch; its own error says why")
        if None not in checksums and len(set(checksums)) > 1:
            raise DisagreementError(
                f"replicas divide a batch differently (checksums {checksums}). All need the same data files, --seed, software "
                "and --epp-costs"
            )


def problem_of(
    args: argparse.Namespace, cap_bytes: tuple[int, ...], placement: tuple[int, ...], host_cap: int = UNLIMITED_BYTES
) -> Problem:
    """Return the planning problem of every batch, without its lengths.

    `cap_bytes` has the cap of every pipeline rank, the smallest of any replica; `host_cap` is the bytes of host memory that
    every rank may use.
    """
    return Problem(
        lengths=(),
        placement=placement,
        cap_bytes=cap_bytes,
        token_multiple=token_multiple(args),
        host_cap_bytes=host_cap,
    )


def lockstep_groups() -> tuple[LockstepGroups, list[list[int]]]:
    """Return the replicas and the global ranks of each group (replicas that share experts). Every rank must call this."""
    mine = (mpu.get_data_parallel_rank(), dist.get_process_group_ranks(mpu.get_expert_tensor_and_model_parallel_group()))
    everyone = from_each(mine)
    replica_of = [replica for replica, _ in everyone]
    lockstep_groups = lockstep_groups_of({replica_of[rank] for rank in sharing} for _, sharing in everyone)
    return lockstep_groups, [
        [rank for rank, replica in enumerate(replica_of) if replica in lockstep_group] for lockstep_group in lockstep_groups
    ]


def _summary(lengths: tuple[int, ...]) -> str:
    """Describe lengths: ``8 sequences of 39 to 7,172 tokens, 12,345 in all, the longest 7172, 3001, 988``."""
    longest = ", ".join(map(str, sorted(lengths, reverse=True)[:_LONGEST]))
    spread = f"{min(lengths, default=0):,} to {max(lengths, default=0):,} tokens"
    return f"{len(lengths)} sequences of {spread}, {sum(lengths):,} in all, the longest {longest}"


_session: Session | None = None
_process: Worker | None = None


def prepare(args: argparse.Namespace) -> None:
    """Start the planning process of the session to come, while there is no model yet. A collective call of all ranks."""
    global _process
    _, ranks = lockstep_groups()
    if args.epp_schedule == "elastic" and dist.get_rank() in {lockstep_ranks[0] for lockstep_ranks in ranks}:
        _process = start_early(options_from(args, training=True))


def _take_process() -> Worker | None:
    """Return the process that `prepare` started, for one session; None if there is none."""
    global _process
    process, _process = _process, None
    return process


def start(args: argparse.Namespace) -> Session:
    """Create the process's session. A previous one, if any, ends."""
    global _session
    end()
    strange = patching.unknown(fingerprints.RELIED_ON) if args.rank == 0 else []
    if strange:
        logger.warning("this Megatron is not as megatron-epp was tested with: look at its %s", ", ".join(strange))
    _session = Session(args)
    return _session


def end() -> None:
    """End the process's session, if there is one."""
    global _session
    if _session is not None:
        _session.close()
    _session = None


def complete_reports() -> None:
    """Complete the report under way, if there is a session."""
    if _session is not None:
        _session.reports.complete()


def current() -> Session:
    """Return the process's session. Raises `EppError` if `start` was not called."""
    if _session is None:
        raise EppError("no elastic run was started: train through megatron.training.pretrain with --epp")
    return _session
