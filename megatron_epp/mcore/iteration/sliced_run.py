"""State of a training on documents that persists across iterations: stages, and the planner that makes plans from lengths."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from megatron_epp.data.batch import GlobalBatch, SequenceDataset
from megatron_epp.data.iterator import DisagreementError, PlanSource, spans_of
from megatron_epp.mcore import early_planning
from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.device_inputs import RankInputs
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import EppError, InfeasibleError, is_unlimited
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.problem import Lengths, Problem
from megatron_epp.port.packed import PackedPlans
from megatron_epp.port.planning import BackgroundPlanner, BatchPlanner
from megatron_epp.runtime.links.objects import ObjectGroup
from megatron_epp.runtime.memory_use import possible_on_device
from megatron_epp.runtime.recorder import Recorder

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts

logger = logging.getLogger(__name__)

_LONGEST = 8
"""Number of lengths that an error message lists."""


class SlicedRun(Run):
    """One process's share of a training on documents or samples.

    In the background, one rank of every lockstep group plans the group's shares of the global batch, which all these ranks
    divide from the same lengths, costs and caps. It is created before the data iterators, whose plans wait until it has a model
    and the costs of that.

    Args:
        attach: makes stages of the rank's model chunks, and settles links, costs and caps; called at the first iteration.
    """

    stages: dict[int, MegatronStage]
    inputs: RankInputs
    """Upload of batches to this rank's device, since `attach`."""
    planning_ranks: ObjectGroup
    untrained_batches = 0
    longest_tokens = 0
    """Tokens of the longest sequence of the training data, on one planning rank until it has looked for a plan; else 0."""
    find_prefixes: Callable[..., tuple[Borrowed, ...]] = staticmethod(lambda dataset, indices: ())  # known since `attach`

    _planner: BatchPlanner | None = None

    def __init__(self, args: argparse.Namespace, attach: Callable[[SlicedRun, Sequence[torch.nn.Module], Any], None]) -> None:
        super().__init__(args)
        self._attach = attach
        self.loss = None if args.epp_loss is None else resolve_name("megatron_epp.losses:load_loss")(args.epp_loss)
        # Set by the training thread in `plan_with`. The thread of the data iterators waits for it with the first batch.
        self._can_plan = threading.Event()

    def attach(self, models: Sequence[torch.nn.Module], config: Any) -> None:
        """Give the run its model chunks, at the first call; later calls do nothing."""
        if not self.stages:
            self._attach(self, models, config)

    def plan_with(self, planner: BatchPlanner) -> None:
        """Plan batches with `planner` from now on; on a rank that plans."""
        self._planner = planner
        self._can_plan.set()

    def after(self, batch: GlobalBatch, recorder: Recorder) -> None:
        """Let features follow a training iteration; in some, a collective call of all ranks."""
        with self.watching("waits for others' times"):
            for feature in self.features:
                feature.after(batch.plan, recorder, partial(self._measured, batch))

    def _measured(self, batch: GlobalBatch) -> dict[str, Any]:
        """Return the share of chunks' tokens that pass the output layer, None without one, and the spans of sequences."""
        last, inputs = self.stages.get(self.placement.num_stages - 1), batch.prepared
        has_output = (last is not None and last.has_loss) or any(feature.rows_of for feature in self.features)
        share = (lambda chunk: inputs.chunk(chunk).output_share) if has_output else None
        return {"output_share": share, "spans": spans_of(batch.dataset, batch.indices)}

    def planner_by(self, costs: PipelineCosts) -> BackgroundPlanner:
        assert self.process is not None  # this rank plans
        is_first = self._planner is None  # which tells its peak, once for a run
        return BackgroundPlanner(costs, self.options, self.lockstep_group, self.lockstep_groups, self.process, is_first)

    def plan_source(self, forward_only: bool, *, of_batch: bool = False) -> PlanSource:
        """Return the source of this rank's plans. With `of_batch` it plans a single batch, and is made in the training thread;
        otherwise one batch after the other.
        """
        plan = self._planner.of_next() if of_batch and self._planner is not None and not forward_only else None
        make = partial(self._plan, forward_only=forward_only, plan=plan) if self.plans else None
        member = self.lockstep_groups[self.lockstep_group].index(self.replica)
        # Both since `attach`; `control` is used in the training thread alone.
        exchange, prepare = lambda plans: self.links.control.from_first(plans), lambda *batch: self.inputs.prepare(*batch)
        return PlanSource(make, exchange, member, self._check_division, self.rank, prepare, self._borrowed)

    def _borrowed(self, dataset: SequenceDataset, indices: Sequence[int]) -> tuple[Borrowed, ...]:
        self._can_plan.wait()
        return self.find_prefixes(dataset, indices)

    def _plan(self, batch: Lengths, *, forward_only: bool, plan: Callable[[Problem], PackedPlans] | None = None) -> PackedPlans:
        assert self._planner is not None
        if self.longest_tokens and not forward_only:
            self._warn_of_longest(self._planner)
        problem = replace(self.problem, **batch._asdict(), forward_only=forward_only)
        try:
            return (plan or self._planner.plan)(problem)
        except EppError as error:
            raise possible_on_device(error).with_context(
                after=f"\nThe batch that this is about has {_summary(batch.lengths)}.", names=self.names
            ) from error

    def _warn_of_longest(self, planner: BatchPlanner) -> None:
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

    def _check_division(self, checksum: int | None) -> None:
        if not self.plans or len(self.lockstep_groups) == 1:
            return
        checksums = self.planning_ranks.from_each(checksum)
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


def use(run: SlicedRun) -> None:
    """Make a run the one of the process's training."""
    global _run
    _run = run


def end() -> None:
    """End the process's run, if there is one."""
    global _run
    if _run is not None:
        _run.close()
    _run = None
    early_planning.end()


def current() -> SlicedRun:
    """Raises `EppError` if no run was started."""
    if _run is None:
        raise EppError("no elastic run was started: train through megatron.training.pretrain with --epp")
    return _run
