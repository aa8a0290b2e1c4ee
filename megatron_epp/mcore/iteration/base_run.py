"""A training by plans, on documents or on a caller's microbatches: groups, watchdog, costs, caps, host memory and resuming."""

from __future__ import annotations

import argparse
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.kept import KeptCosts
from megatron_epp.cost.learning import Learner, deviation, fitted_costs, size_of, untold
from megatron_epp.data.iterator import DisagreementError
from megatron_epp.features import Asked, RunFeature, targets
from megatron_epp.launch.run_folder import hold, new_run_id
from megatron_epp.mcore.arguments.layout import placement_of, token_multiple, token_shards
from megatron_epp.mcore.arguments.table import TRAINING, names_of
from megatron_epp.mcore.costs.learnt import fingerprint, keep, resumed
from megatron_epp.mcore.costs.sources import Step
from megatron_epp.mcore.costs.watch import StageWatch
from megatron_epp.mcore.iteration.loggers import Totals
from megatron_epp.mcore.iteration.reduction import process_groups
from megatron_epp.mcore.iteration.report_folder import ReportFolder, Reports
from megatron_epp.mcore.model.stage import own_device
from megatron_epp.mcore.training.caps import agreed_caps
from megatron_epp.mcore.training.nccl_settings import groups_in_use, link_options, reduce_once, time_limit
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.errors import Names
from megatron_epp.plan.problem import LockstepGroups, Problem, connected
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups, ObjectGroup, from_each_of_job, made_by_first
from megatron_epp.runtime.side_thread import complete_at_end
from megatron_epp.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron_epp.losses import Loss
    from megatron_epp.mcore.model.own_inputs import OwnInputs

logger = logging.getLogger(__name__)


def _num_trained(stage: Any) -> int:
    return sum(weight.numel() for weight in stage.model.parameters() if weight.requires_grad)


_runs: weakref.WeakSet[Run] = weakref.WeakSet()
"""Runs of this process."""
NOTHING_TRAINS = (
    "nothing trains: requires_grad is False for all parameters of the model on all ranks, and the optimizer has no gradients"
)
_STEPS = len(get_args(Step.__value__))


class Run:
    """One process's share of a training by plans. Every rank of the job must create it, and call its methods, together.

    Replicas (one per data-parallel rank) that share experts form a lockstep group, whose ranks run plans made together; without
    expert parallelism every replica is a group of its own.
    """

    stages: dict[int, Any]
    """This rank's stages by their number in the pipeline; empty before `connect`."""
    links: Links
    """Connections between the ranks that run the same plan, since `connect`."""
    groups: Groups
    link_options: Callable[[], Any] | None
    device: torch.device
    problem: Problem
    """Planning problem of every batch, without its lengths, since `settle`."""
    costs: PipelineCosts | None = None
    """None before `settle`, and if the schedule needs no plans."""
    learnt_with: dict[str, Any] | None = None
    """Flags and model that learnt costs depend on; None if none are learnt."""
    saved_costs: KeptCosts | None = None
    """Learnt costs, to be kept with checkpoints; None while they are learnt, and if they are not."""
    watch: StageWatch | None = None
    """Comparison of iterations with their plans; None before `settle`, and if times are by formula."""

    features: tuple[RunFeature, ...] = ()
    loss: Loss | None = None
    """A loss of the user's, which our own stages compute; None for Megatron's, and where the caller's step has its loss."""
    own_inputs: OwnInputs | None = None
    plan_wait_us = 0.0
    peak_text = ""
    """Line with the peaks of the first plan and the parts of the highest, until it is logged."""
    report_folder: ReportFolder | None = None

    names: Names = TRAINING
    """Names of settings, in errors and logs, for who started the run."""
    makes_chunks = True
    """False if chunks are whole microbatches of a caller."""

    _step: Step | None = None  # of settling costs, while it is under way

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.names = args, names_of(args)
        self.rank, self.placement = mpu.get_pipeline_model_parallel_rank(), placement_of(args)
        self.replica, self.replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.lockstep_groups, self.lockstep_ranks = lockstep_groups()
        self.lockstep_group = next(number for number, group in enumerate(self.lockstep_groups) if self.replica in group)
        self.failures = FailureBoard.of_job()
        limit = self.names["wait_limit_seconds"]
        self.watchdog = Watchdog(args.epp_wait_limit_seconds, failures=self.failures, limit_name=limit)
        self.stages = {}
        self.run_id = made_by_first(lambda: _hold_folders(args))
        self.iteration: int = args.iteration
        self.batches_seen: list[tuple[int, ...]] = []
        self.totals = Totals()
        """Sums over the logged iterations, on the last rank."""
        self.reports = Reports()
        _runs.add(self)
        if dist.get_rank() == 0 and args.epp_report_dir is not None:
            self.report_folder = ReportFolder(Path(args.epp_report_dir), self.run_id, args.epp_trace or ())

    @property
    def own_ranks(self) -> list[int]:
        """Global ranks of this rank's lockstep group."""
        return self.lockstep_ranks[self.lockstep_group]

    @property
    def asked(self) -> Asked:
        """Wishes of the user, by which features belong to the run."""
        return Asked(self.args, self.loss)

    def watching(self, what: str) -> AbstractContextManager[None]:
        """Watch the body: if it exceeds the limit, the run ends with a message that this rank `what`, as in ``waits``."""
        return self.watchdog.watch(lambda: f"rank {self.rank} {what} ({self.watchdog.limit_name})")

    @contextmanager
    def telling_others(self, unless: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Tell all ranks of the job why this one fails; if another rank's failure is the cause, raise an `EppError` with it.

        Errors of `unless` are raised by every other rank as well, so that none waits for this one.
        """
        try:
            yield
        except Exception as error:
            is_ours = isinstance(error, EppError) and (error.__cause__ is None or isinstance(error.__cause__, EppError))
            if not is_ours and (cause := self.failures.cause()):
                raise EppError(cause) from None
            if isinstance(error, EppError) and not error.names:
                error.names = self.names
            if not isinstance(error, unless) or isinstance(error, DisagreementError):  # which only some ranks have seen
                self.failures.tell(str(error) if isinstance(error, EppError) else f"{type(error).__name__}: {error}")
            raise

    def connect(self, stages: dict[int, Any]) -> None:
        """Make the groups over which these stages of the rank exchange messages."""
        self.stages = stages
        self.device = own_device()
        pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
        used = directions(self.placement.rank_of)
        # Megatron's function lists the groups whose time limit --distributed-timeout-seconds-after-init changes.
        self.groups, self.link_options = Groups(time_limit(self.args), mpu.create_group), link_options(self.args, used)
        self.links = Links.create(pipeline, self.own_ranks, self.groups, used, self.link_options)
        self._trained = {number: _num_trained(stage) for number, stage in stages.items()}
        everyone = self.links.control.from_each([number for number, count in self._trained.items() if count])
        first = min(itertools.chain(*everyone), default=self.placement.num_stages)
        if not self.makes_chunks and first == self.placement.num_stages and dist.get_rank() == 0:
            logger.warning(NOTHING_TRAINS)  # samples ask in every call
        for number, stage in stages.items():
            stage.has_gradient = number >= first
        self.reports.connect(self.groups, self.rank == self.placement.num_ranks - 1)
        self.features = tuple(filter(None, (make(self) for make in targets(self.asked, "run"))))

    def check_trained(self) -> None:
        """Warn where a program has frozen or freed parameters since `connect`, which costs do not follow. Raises `EppError` if
        a stage trains whose backwards compute no gradients, as nothing trained there or ahead of it.
        """
        for number, stage in self.stages.items():
            now, before = _num_trained(stage), self._trained[number]
            if now == before:
                continue
            counts = f"of stage {number} {now:,} parameters train, and {before:,} did before the first iteration"
            if not stage.has_gradient:
                raise EppError(f"{counts}, so plans compute no gradients there: let them train from the first iteration on")
            logger.warning("%s: plans count the time and memory of those; freeze parameters before the first iteration", counts)
            self._trained[number] = now

    def use_communicators(self) -> None:
        """Use every communicator once, so that caps on memory, which follow, count what they have allocated."""
        with self.watching("waits for others to meet"):
            self.links.connect(self.device)
            # Megatron's too: some are used for the first time only in the optimizer's step, when caps have been settled.
            reduce_once(groups_in_use(self.args), self.device)
            for feature in self.features:
                feature.allocate()

    def settle(
        self,
        prior: Callable[[Callable[[Step], None]], PipelineCosts],
        learns: bool,
        resume: Callable[[PipelineCosts, PipelineCosts], PipelineCosts],
        loaded: Sequence[KeptCosts] = (),
    ) -> None:
        """Settle costs and caps with all ranks, and prepare host memory and the comparison of iterations with plans.

        A rank that waits for others does not know their steps, so it waits for the sum of all steps' limits.

        Args:
            prior: gives costs by formula or from a file; it is given a function to call with each of its steps beforehand.
            learns: the run corrects its costs by its first iterations, unless an earlier run has.
            resume: gives the costs of this run from what `prior` gave and what an earlier run has learnt.
            loaded: learnt costs that were given instead of a checkpoint's.
        """
        limit_s = _STEPS * self.watchdog.limit_s
        with self.watchdog.watch(self._what_it_settles, lambda: self._step, limit_s):
            try:
                self.costs = prior(self.note)
                if learns:
                    self.note("looking for learnt costs")
                    self.costs = self._resumed(self.costs, resume, loaded)
                self.note("exchanging memory caps")
                multiple = (token_multiple if self.makes_chunks else token_shards)(self.args)
                self.problem = Problem((), self.placement.rank_of, agreed_caps(self.args, self.links.position), multiple)
                # Not with times by formula, which are not this machine's: stages would be named slow without being so.
                if learns or self.args.epp_costs != "analytic":
                    self.watch = StageWatch(self.rank, ObjectGroup.create(self.links.control.ranks, self.groups))
                for feature in self.features:
                    feature.settled(self.costs)
            finally:
                self._step = None

    def _resumed(
        self,
        prior: PipelineCosts,
        resume: Callable[[PipelineCosts, PipelineCosts], PipelineCosts],
        loaded: Sequence[KeptCosts],
    ) -> PipelineCosts:
        models = {number: stage.model for number, stage in self.stages.items()}
        self.learnt_with = fingerprint(self.args, models, self.links)
        known = resumed(self.args, loaded, self.learnt_with)
        if known is None:
            return prior
        self._keep(known)  # this run may save to another folder
        return resume(prior, known)

    def note(self, step: Step) -> None:
        """Note a step of settling costs before it starts."""
        self._step = step

    def measured(self, costs: PipelineCosts) -> PipelineCosts:
        """Return costs with what features measure on this rank's stages. A collective call."""
        for feature in self.features:
            costs = feature.measured(costs)
        return costs

    def counting(
        self, plan: Plan | None, parameters: Sequence[torch.Tensor], counts: bool, others: Callable[[], int] = lambda: 0
    ) -> SavedTensors | None:
        """Return what counts the tensors that autograd saves in an iteration, a feature's if one does more with them; None if
        none does and the run does not count them.
        """
        of_features = () if plan is None else (feature.counting(plan, parameters, others) for feature in self.features)
        return next(filter(None, of_features), SavedTensors(parameters, others) if counts else None)

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of the last iteration that features have."""
        return {name: figure for feature in self.features for name, figure in feature.figures.items()}

    def _what_it_settles(self) -> str:
        return (
            f"rank {self.rank} has been {self._step} for {_STEPS * self.watchdog.limit_s:g} s, {self.watchdog.limit_s:g} s for "
            f"each of {_STEPS} steps ({self.watchdog.limit_name})"
        )

    def fit(
        self,
        learner: Learner,
        plan: Plan | None,
        keeps_weights: bool = False,
        complete: Callable[[PipelineCosts], PipelineCosts] = lambda costs: costs,
        note: str = "",
    ) -> PipelineCosts:
        """Fit costs to what all ranks have recorded, keep them with checkpoints, and return them with what `complete` adds.

        `plan` is that of the last recorded iteration; None if this replica ran none. For `keeps_weights` see `fitted_costs`.
        """
        assert self.costs is not None  # since `settle`
        before, everyone = self.costs, from_each_of_job(learner.learnt)
        costs = complete(made_by_first(lambda: fitted_costs(before, everyone, keeps_weights=keeps_weights)))
        if dist.get_rank() == 0 and plan is not None:
            ratio = deviation(before, costs, [size_of(plan, chunk) for chunk in range(len(plan.chunks))])
            stays = ", ".join(untold(before, everyone))
            stays = stays and f"; these batches do not tell, so the ratio is that of formulas: {stays}"
            logger.info("costs learnt from %d iterations: they took %s%s%s", learner.recorded, ratio, stays, note)
        self._keep(costs)
        self.costs = costs
        return costs

    def _keep(self, costs: PipelineCosts) -> None:
        assert self.learnt_with is not None  # costs are learnt
        self.saved_costs = KeptCosts(costs, self.learnt_with)
        keep(self.args, self.saved_costs)

    def finish_gradients(
        self, models: list[torch.nn.Module], num_tokens: torch.Tensor, pg_collection: Any, force_all_reduce: bool | None
    ) -> None:
        """Reduce gradients over replicas and between embeddings, and divide them by the number of tokens, as Megatron does."""
        config = get_model_config(models[0])
        if config.finalize_model_grads_func is None:  # as in Megatron's schedules: the caller finishes gradients by itself
            return
        with self.watching("waits for gradient finalisation"):
            groups = process_groups(models[0]) if pg_collection is None else pg_collection
            counted = num_tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(models, counted, pg_collection=groups, force_all_reduce=force_all_reduce)

    def close(self) -> None:
        """Wait until background threads have completed their work."""
        complete_at_end(self.reports.complete)
        if self.watch is not None:
            complete_at_end(self.watch.complete)


def complete_reports() -> None:
    """Write the lines of the last iteration, before a writer is closed or a checkpoint is saved."""
    for run in _runs:
        run.reports.complete()


def lockstep_groups() -> tuple[LockstepGroups, list[list[int]]]:
    """Return the replicas and the global ranks of each group (replicas that share experts). Every rank must call this."""
    mine = (mpu.get_data_parallel_rank(), dist.get_process_group_ranks(mpu.get_expert_tensor_and_model_parallel_group()))
    everyone = from_each_of_job(mine)
    replica_of = [replica for replica, _ in everyone]
    groups = connected({replica_of[rank] for rank in sharing} for _, sharing in everyone)
    return groups, [[rank for rank, replica in enumerate(replica_of) if replica in group] for group in groups]


def _hold_folders(args: argparse.Namespace) -> str:
    """Keep other runs out of this one's folders, and return its identifier. Raises `EppError` if another has one of them."""
    run = new_run_id()
    for folder in {getattr(args, "save", None), args.epp_report_dir} - {None}:
        hold(folder, run)
    return run
