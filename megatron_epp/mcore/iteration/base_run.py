"""A training by plans, on documents or on a caller's microbatches: its ranks, watchdog and failures, and a plan's run."""

from __future__ import annotations

import argparse
import logging
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_epp.data.iterator import DisagreementError
from megatron_epp.features import Asked
from megatron_epp.launch.run_folder import hold
from megatron_epp.mcore.arguments.layout import placement_of
from megatron_epp.mcore.arguments.table import TRAINING, names_of
from megatron_epp.mcore.iteration.loggers import Reports, Totals
from megatron_epp.mcore.iteration.reduction import Reduction, gather_parameters, process_groups
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.plan import EppError, Op, Plan
from megatron_epp.plan.errors import Names, reason_of
from megatron_epp.plan.problem import LockstepGroups, Options, Problem, connected
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import Program
from megatron_epp.runtime.executor import HANDLERS, Executor, Handler
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups, from_each_of_job, made_by_first
from megatron_epp.runtime.memory_use import device_usage
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.side_thread import complete_at_end
from megatron_epp.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron_epp.cost.kept import KeptCosts
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.losses import Loss
    from megatron_epp.mcore.model.own_inputs import OwnInputs
    from megatron_epp.port.planning import BackgroundPlanner, PlanningProcess

logger = logging.getLogger(__name__)


def num_trained(stage: Any) -> int:
    return sum(weight.numel() for weight in stage.model.parameters() if weight.requires_grad)


BeginStage = Callable[[Any, Callable[[], None], Callable[[], None]], None]
"""Gives a stage its inputs, and what it calls before its last gradient and when its gradients are complete."""
_runs: weakref.WeakSet[Run] = weakref.WeakSet()
"""Runs of this process."""
NOTHING_TRAINS = (
    "nothing trains: requires_grad is False for all parameters of the model on all ranks, and the optimizer has no gradients"
)


class Run:
    """One process's share of a training by plans. Every rank of the job must create it, and call its methods, together.

    Replicas (one per data-parallel rank) that share experts form a lockstep group, whose ranks run plans made together; without
    expert parallelism every replica is a group of its own.
    """

    stages: dict[int, Any]
    """This rank's stages by their number in the pipeline; empty before `mcore.start.run_start.connect`."""
    trained: dict[int, int]
    """Numbers of parameters that train, by stage."""
    links: Links
    """Connections between the ranks that run the same plan."""
    groups: Groups
    link_options: Callable[[], Any] | None
    device: torch.device
    problem: Problem
    """Planning problem of every batch, without its lengths, since `mcore.start.run_start.settle`."""
    costs: PipelineCosts
    """Costs by which plans to come are made."""
    options: Options
    loaded_costs: Sequence[KeptCosts] = ()
    """Learnt costs that were given instead of a checkpoint's."""
    step: str | None = None
    """Step of settling costs, while it is under way."""

    process: PlanningProcess | None = None
    """Makes the plans of this rank's lockstep group; None on ranks that do not plan."""
    features: tuple[RunFeature, ...] = ()
    loss: Loss | None = None
    """A loss of the user's, which our own stages compute; None for Megatron's, and where the caller's step has its loss."""
    own_inputs: OwnInputs | None = None
    plan_wait_us = 0.0
    peak_text = ""
    """Line with the peaks of the first plan and the parts of the highest, until it is logged."""

    names: Names = TRAINING
    """Names of settings, in errors and logs, for who started the run."""
    makes_chunks = True
    """False if chunks are whole microbatches of a caller."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.names = args, names_of(args)
        self.rank, self.placement = mpu.get_pipeline_model_parallel_rank(), placement_of(args)
        self.replica, self.replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.lockstep_groups, self.lockstep_ranks = lockstep_groups()
        self.lockstep_group = next(number for number, group in enumerate(self.lockstep_groups) if self.replica in group)
        self.plans = dist.get_rank() == self.own_ranks[0]
        """The first rank of a group plans."""
        self.failures = FailureBoard.of_job()
        limit = self.names["wait_limit_seconds"]
        self.watchdog = Watchdog(args.epp_wait_limit_seconds, failures=self.failures, limit_name=limit)
        self.stages = {}
        self.run_id = made_by_first(lambda: _hold_folders(args))
        self.iteration: int = args.iteration
        self.totals = Totals()
        """Sums over the logged iterations, on the last rank."""
        self.reports = Reports()
        _runs.add(self)

    @property
    def own_ranks(self) -> list[int]:
        """Global ranks of this rank's lockstep group."""
        return self.lockstep_ranks[self.lockstep_group]

    @property
    def asked(self) -> Asked:
        """Wishes of the user, by which features belong to the run."""
        return Asked(self.args, self.loss, not self.makes_chunks)

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
                self.failures.tell(reason_of(error))
            raise

    def check_trained(self) -> None:
        """Warn where a program has frozen or freed parameters since `connect`, which costs do not follow. Raises `EppError` if
        a stage trains whose backwards compute no gradients, as nothing trained there or ahead of it.
        """
        for number, stage in self.stages.items():
            now, before = num_trained(stage), self.trained[number]
            if now == before:
                continue
            counts = f"of stage {number} {now:,} parameters train, and {before:,} did before the first iteration"
            if not stage.has_gradient:
                raise EppError(f"{counts}, so plans compute no gradients there: let them train from the first iteration on")
            logger.warning("%s: plans count the time and memory of those; freeze parameters before the first iteration", counts)
            self.trained[number] = now

    def completed(self, learnt: PipelineCosts) -> PipelineCosts:
        """Return learnt costs with what iterations do not tell. A collective call."""
        return learnt

    def note(self, step: str) -> None:
        """Note a step of settling costs before it starts."""
        self.step = step

    def measured(self, costs: PipelineCosts) -> PipelineCosts:
        """Return costs with what features measure on this rank's stages. A collective call."""
        for feature in self.features:
            costs = feature.measured(costs)
        return costs

    def counting(
        self, plan: Plan | None, parameters: Iterable[torch.Tensor], counts: bool, others: Callable[[], int] = lambda: 0
    ) -> SavedTensors | None:
        """Return what counts the tensors that autograd saves in an iteration, a feature's if one does more with them; None if
        none does and the run does not count them.
        """
        if plan is not None:
            for feature in self.features:
                if (saved := feature.counting(plan, parameters, others)) is not None:
                    return saved
        return SavedTensors(parameters, others) if counts else None

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of the last iteration that features have."""
        return {name: figure for feature in self.features for name, figure in feature.figures.items()}

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function in the planning process, on the first rank of the job."""
        assert self.process is not None
        return self.process.call(name, *args)

    def plan_by(self, costs: PipelineCosts) -> None:
        """Use other costs for plans to come."""
        self.costs = costs

    def planner_by(self, costs: PipelineCosts) -> BackgroundPlanner:
        """Return a planner by these costs, on a rank that plans batches."""
        raise NotImplementedError

    def run_plan(
        self,
        models: Sequence[torch.nn.Module],
        plan: Plan,
        recorder: Recorder,
        saved: SavedTensors | None,
        reduction: Reduction,
        begin: BeginStage,
        program: Program,
        inputs: Callable[[int], Any] | None = None,
    ) -> None:
        """Run this rank's part of a plan, and start the reduction of gradients, while `saved` counts tensors. For `program` see
        `Executor`; `inputs` of a chunk are for features, and None if chunks are a caller's microbatches.
        """
        if not plan.forward_only:
            self.check_trained()

        def out_of_memory(*failed: Any) -> str:  # with a text that only a run which fails imports
            asked = partial(device_usage, saved=saved), self.args.epp_recompute != "auto", self.makes_chunks, self.names
            text: str = resolve_name("megatron_epp.runtime.out_of_memory:OutOfMemoryReport")(*asked).text(*failed)
            return text

        # What the plan does not order is launched around it, at the same points on all ranks: the gathering of parameters, then
        # what features launch before and behind it.
        with reduction, saved or nullcontext(), torch.set_grad_enabled(not plan.forward_only), ExitStack() as around:
            if not plan.forward_only:
                gather_parameters(get_model_config(models[0]), models)
            handlers: Mapping[Op, Handler] = HANDLERS
            for feature in self.features:
                handlers = {**handlers, **around.enter_context(feature.running(plan, inputs, reduction, handlers))}
            for index, stage in enumerate(self.stages.values()):
                begin(stage, partial(reduction.before_last_gradient, index), partial(reduction.reduce, index))
            watched = recorder, self.watchdog
            own = plan, self.rank, self.stages, program, self.links
            Executor(*own, *watched, out_of_memory=out_of_memory, handlers=handlers).run()

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
        """Wait for the work of background threads, and end planning. A thread that still waits for a plan gets an error."""
        try:
            complete_at_end(self.reports.complete)
            for feature in self.features:
                feature.close()
        finally:
            if self.process is not None:
                self.process.close()


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
    run = secrets.token_hex(4)
    for folder in {getattr(args, "save", None), args.epp_report_dir} - {None}:
        hold(folder, run)
    return run
