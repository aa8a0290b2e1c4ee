"""A run on a script's own microbatches: its stages and plans, which last over calls of the schedule."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron_epp.cost.kept import KeptCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.whole_microbatches import of_whole_microbatches, with_static
from megatron_epp.features import targets
from megatron_epp.mcore.arguments.flag import GIVEN
from megatron_epp.mcore.arguments.layout import token_shards
from megatron_epp.mcore.arguments.setting_checks import advice
from megatron_epp.mcore.costs.megatron_facts import FORMULAS, run_facts, trained_share
from megatron_epp.mcore.costs.sources import Step, by_stage, gathered
from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.microbatch_agreement import (
    AgreedShapes,
    Ahead,
    LocalShapes,
    Shapes,
    agree_on_shapes,
    installed,
)
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatches, tensor_bytes
from megatron_epp.mcore.iteration.microbatch_stage import MicrobatchStage, layers_of
from megatron_epp.mcore.iteration.reduction import Reduction
from megatron_epp.mcore.iteration.report import IterationReport
from megatron_epp.mcore.iteration.run_feature import Learning
from megatron_epp.mcore.iteration.schedule_call import ScheduleCall, is_replay
from megatron_epp.mcore.releases import reads_ahead
from megatron_epp.mcore.start.run_start import connect, settle, use_communicators
from megatron_epp.plan import Action, EppError, InfeasibleError, Op, Plan
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.errors import Names, reason_of
from megatron_epp.plan.plan_figures import offload_share
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.port.packed import MicrobatchLengths, OrderedPlan, PackedPlan
from megatron_epp.port.planning import PlanningProcess
from megatron_epp.runtime.context import Program, chunk_layouts
from megatron_epp.runtime.links.objects import from_each_of_job, made_by_first
from megatron_epp.runtime.memory_use import possible_on_device
from megatron_epp.runtime.side_thread import SideThread

logger = logging.getLogger(__name__)

_AS_GIVEN = "plan_as_given"
_MOST_PLANS = 64
"""Plans that are kept; batches of equal shapes repeat where microbatches have a fixed size. Not measured."""


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """This replica's plan of whole microbatches."""

    plan: Plan  # the plan, a chunk per microbatch
    order: tuple[int, ...]  # the microbatch of every chunk
    actions: tuple[Action, ...]  # the lowered actions of this rank
    plan_digest: str  # of the plan as it was made, for the microbatches that all replicas run it with
    planning_us: float

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.plan.lengths

    def of(self, shapes: Shapes) -> MicrobatchPlan:
        """Return the same plan for other microbatches (`OrderedPlan.of`)."""
        return replace(self, plan=OrderedPlan(self.plan, self.order).of(_lengths_of(shapes)).plan)


_Key = tuple[AgreedShapes, bool]
"""Inputs of a plan of microbatches besides costs: what all replicas have agreed on, and whether no backward runs."""


def _key(agreed: AgreedShapes, forward_only: bool) -> _Key:
    return agreed._replace(own=()), forward_only


def _lengths_of(shapes: Shapes) -> MicrobatchLengths:
    return tuple(shape.lengths for shape in shapes)


class MicrobatchRun(Run):
    """A run on microbatches of a script, which run whole. Every rank of the job must create it together.

    The first training iterations run the microbatches in the script's order, in 1F1B, and are measured; then plans are made
    from what was measured, unless an earlier run of the same model has learnt its costs. Without `loaded` ones, they are read
    in the folder of the loaded checkpoint.
    """

    stages: dict[int, MicrobatchStage]
    makes_chunks = False
    find_prefixes: Callable[..., tuple[Borrowed, ...] | None] = staticmethod(lambda shapes, items: None)
    """Returns `LocalShapes.borrowed`, of microbatches of which a rank without data has none."""

    def __init__(self, args: argparse.Namespace, models: list[torch.nn.Module], loaded: Sequence[KeptCosts] = ()) -> None:
        super().__init__(args)
        for adopt in targets(self.asked, "built"):
            adopt([unwrap_model(model) for model in models], args)
        self.models, self._on_gpu, self.loaded_costs = models, torch.cuda.is_initialized(), loaded
        config, last, is_virtual = get_model_config(models[0]), self.placement.num_stages - 1, len(models) > 1
        stages = {
            stage: MicrobatchStage(model, config, stage == last, number if is_virtual else None, token_shards(args))
            for number, (stage, model) in enumerate(zip(self.placement.stages(self.rank), models, strict=True))
        }
        self.process = PlanningProcess() if self.plans else None
        connect(self, stages)
        self._can_look_ahead: bool | None = None
        self.ahead = Ahead(self._agreed_ahead)
        self._thread = None if self.process is None else SideThread("epp-planning")  # which waits for the process
        self._begun: tuple[_Key, Future[tuple[PackedPlan, tuple[int, ...]]]] | None = None
        """Plan of the next iteration, where this rank plans and has begun."""
        use_communicators(self)  # ahead of `settle`, whose caps then count their memory
        self.learning = next(feature for feature in self.features if isinstance(feature, Learning))
        settle(self, self._by_formula)
        obstacles = self.links.control.from_each([stage.recompute_obstacle for stage in self.stages.values()])
        if obstacle := next((text for each in obstacles for text in each if text), ""):
            self.options = _without_recompute(self.options, obstacle, self.names, is_asked=args.epp_offload == "on")
        self._plans: dict[_Key, MicrobatchPlan] = {}
        self._measured: AgreedShapes | None = None
        """Microbatches of the last training iteration that was recorded for costs."""
        self._last: tuple[tuple[Shapes, bool], MicrobatchPlan | None] | None = None

    @property
    def raised_by_all(self) -> type[Exception] | tuple[type[Exception], ...]:
        """Errors that every rank of the job raises if one with the same plan does: none if there are several plans."""
        return Exception if len(self.lockstep_ranks) == 1 else ()

    def agreed(self, shapes: Shapes | None, problem: str, num_bytes: int, items: Sequence[Sequence[Any]]) -> AgreedShapes:
        """Return what all ranks with the same plan know of an iteration's microbatches (`LocalShapes`), `items` of each of this
        rank's chunks. A collective call.
        """
        borrowed = None
        try:
            if self.learning.is_done:  # costs are learnt from what stock would run
                borrowed = self.find_prefixes(shapes, items)
        except Exception as error:  # alone, it would leave other ranks waiting
            problem = problem or reason_of(error)
        local = LocalShapes(shapes, problem, self.rank, num_bytes, self.replica, borrowed)
        return agree_on_shapes(local, self.links.control)

    def plan_of_call(self, agreed: AgreedShapes, forward_only: bool) -> MicrobatchPlan | None:
        """Return the plan for a call of the schedule; None if it has no microbatches. A collective call.

        An iteration that Megatron's rerun machine repeats has the plan of the first time, whatever was learnt from that.
        """
        key = agreed.here, forward_only
        if self._last is None or self._last[0] != key or not is_replay():
            self._last = key, self.planned(agreed, forward_only)
        return self._last[1]

    def planned(self, agreed: AgreedShapes, forward_only: bool) -> MicrobatchPlan | None:
        """Return this replica's plan for microbatches of given shapes. A collective call at their first use.

        A process makes it on the group's first rank, so that planning takes no time from the interpreter that trains.
        """
        if not agreed.shapes:
            return None
        key = _key(agreed, forward_only)
        if key not in self._plans:
            packed, order = made_by_first(partial(self._begun_or_made, key, agreed), self.links.control)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            actions = packed.actions(self.rank)
            self._plans[key] = MicrobatchPlan(packed.plan(), order, actions, packed.plan_digest, packed.planning_us)
            if dist.get_rank() == 0:
                _tell(self._plans[key].plan, agreed, self.learning.is_done)
        return self._plans[key].of(agreed.own) if agreed.own else self._plans[key]

    def _begun_or_made(self, key: _Key, agreed: AgreedShapes) -> tuple[PackedPlan, tuple[int, ...]]:
        if self._begun is not None and self._begun[0] == key:
            return self._begun[1].result()
        return self._make(agreed, forward_only=key[1])

    def can_look_ahead(self, iterators: list[Any]) -> bool:
        """True if all iterators of all ranks are Megatron's own, which last for the training. A collective call at first."""
        if self._can_look_ahead is None:
            mine = reads_ahead(self.args) and installed(iterators) is not None
            self._can_look_ahead = all(self.links.control.from_each(mine))
        return self._can_look_ahead

    def _agreed_ahead(self, shapes: Shapes | None, problem: str, items: list[list[Any]]) -> AgreedShapes:
        agreed = self.agreed(shapes, problem, tensor_bytes(items, self.device), items)
        if self._thread is not None and agreed.shapes and (key := _key(agreed, False)) not in self._plans:
            self._begun = key, self._thread.submit(partial(self._make, agreed, False))
        return agreed

    def run_microbatches(
        self,
        call: ScheduleCall,
        sources: list[Microbatches],
        agreed: AgreedShapes,
        planned: MicrobatchPlan | None,
        report: IterationReport,
    ) -> tuple[list[Any], torch.Tensor]:
        """Run all microbatches of each of this rank's chunks, whose plan is None without any: then it only reduces zeros.
        Returns what losses reported, in the caller's order (empty but on the last rank), and the number of tokens.
        """
        measures = self.learning.is_recording and not call.forward_only
        reduction = Reduction(get_model_config(self.models[0]), self.models, self.rank == 0, self.options.split_weight)
        if planned is None:
            if not call.forward_only:
                with reduction:
                    reduction.reduce_all()
                self._after(None, report)
            return [], torch.zeros([], dtype=torch.int, device=self.device)
        parameters = (parameter for model in self.models for parameter in model.parameters())
        report.saved = self.counting(planned.plan, parameters, measures and not self._on_gpu)
        microbatches = dict(zip(self.stages.values(), sources, strict=True))

        def begin(stage: MicrobatchStage, *calls: Callable[[], None]) -> None:
            stage.begin(call, microbatches[stage], agreed, planned.plan, planned.order, report.saved, *calls)

        program = Program(planned.actions, chunk_layouts(planned.plan))
        self.run_plan(self.models, planned.plan, report.recorder, report.saved, reduction, begin, program)
        self._measured = agreed if measures else self._measured
        if not call.forward_only:
            self._after(planned.plan, report)
        for stage in self.stages.values():
            stage.end()
        return [result for index in sorted(stage.results) for result in stage.results[index]], stage.total_tokens

    def _by_formula(self, note: Callable[[Step], None]) -> PipelineCosts:
        """Return costs by formula, with the measured link to the host if plans offload. A collective call."""
        note("counting layers")
        mine = {number: (len(layers_of(stage.model)), trained_share(stage)) for number, stage in self.stages.items()}
        counts, trained = zip(*by_stage(mine, self.links), strict=True)
        asked = None, counts, trained, (), True
        by_formula, _ = made_by_first(lambda: self._of_formulas("prior", *asked))
        return self.measured(of_whole_microbatches(by_formula))

    def _make(self, agreed: AgreedShapes, forward_only: bool) -> tuple[PackedPlan, tuple[int, ...]]:
        assert self.process is not None  # this rank plans
        problem: Problem = replace(self.problem, forward_only=forward_only)
        asked = _lengths_of(agreed.shapes), problem, self._with_microbatches(self.costs, agreed), self.options
        in_order = self.args.epp_order == GIVEN
        as_given = "plan_in_order_as_given" if in_order else _AS_GIVEN
        if not self.learning.is_done:
            return self.process.plan_microbatches(as_given, *asked)
        try:
            if in_order:
                return self.process.plan_microbatches("plan_in_order", *asked)
            # Of each chunk its own tokens: those that nothing reads take no time behind the layers.
            trained = tuple((length,) for each in asked[0] for length in each) if agreed.is_unread else ()
            sharing = replace(problem, borrowed=agreed.borrowed, trained=trained)
            return self.process.plan_microbatches("plan_microbatches", asked[0], sharing, *asked[2:])
        except InfeasibleError as error:
            logger.warning("microbatches run in their own order, in 1F1B: %s", advice(possible_on_device(error), self.names))
            return self.process.plan_microbatches(as_given, *asked)

    def _of_formulas(self, name: str, *args: Any) -> Any:
        return self.ask(f"{FORMULAS}:{name}", run_facts(self.args, self.ask), *args)

    def _with_microbatches(self, costs: PipelineCosts, agreed: AgreedShapes) -> PipelineCosts:
        """Add the bytes of microbatches on devices, which the first stage of each rank holds throughout."""
        held = {self.placement.stages(rank)[0]: size for rank, size in enumerate(agreed.num_bytes)}
        return with_static(costs, lambda stage, static: replace(static, microbatches=held.get(stage, 0)))

    def _after(self, plan: Plan | None, report: IterationReport) -> None:
        """Let features follow a training iteration; in some, a collective call of all ranks."""
        if self._on_gpu and not self.learning.is_done and (plan is None or not self.learning.is_recording):
            torch.cuda.reset_peak_memory_stats()  # kernels are chosen in the first iteration, which may have had a higher peak
        for feature in self.features:
            feature.after(plan, report.recorder, self._measured_bytes)

    def _measured_bytes(self) -> dict[str, Any]:
        return {
            "kept_bytes": {
                (op, number, chunk): size
                for number, stage in self.stages.items()
                for op, sizes in ((Op.F, stage.kept_bytes), (Op.W, stage.weight_bytes))
                for chunk, size in sizes.items()
            },
            "peak_bytes": torch.cuda.max_memory_allocated() if self._on_gpu else 0,
            "offloadable_share": self.figures.get("offloadable_share"),
        }

    def plan_by(self, costs: PipelineCosts) -> None:
        super().plan_by(costs)
        self._plans.clear()

    def completed(self, learnt: PipelineCosts) -> PipelineCosts:
        """Return learnt costs with the bytes of a GPU that the recorded iterations took besides what their plans counted.

        Those that are held only while a pass runs are counted by its tokens: later microbatches may be longer.
        """
        if not self._on_gpu:
            return learnt
        learnt = made_by_first(partial(self._of_formulas, "with_device_memory", learnt))
        peaks, counted = gathered(self.learning.peak_bytes, self.links, max), self._planned_peaks(learnt)
        first = {self.placement.stages(rank)[0]: max(0, peak - counted[rank]) for rank, peak in enumerate(peaks)}
        replicas = from_each_of_job(first)
        held = {stage: max(each[stage] for each in replicas) for stage in first}
        return with_static(learnt, lambda stage, _: Static(weights=held.get(stage, 0)))

    def _planned_peaks(self, learnt: PipelineCosts) -> Sequence[int]:
        """Return the peak bytes by rank of the last recorded iteration, by learnt costs without static bytes."""
        if self._measured is None:
            return (0,) * self.problem.num_ranks
        counted = self._with_microbatches(with_static(learnt, lambda *_: Static()), self._measured)
        asked = _lengths_of(self._measured.shapes), self.problem, counted, self.options

        def peaks() -> Sequence[int]:
            assert self.process is not None  # this rank plans
            return self.process.plan_microbatches(_AS_GIVEN, *asked)[0].plan().predicted.peak_bytes

        return made_by_first(peaks, self.links.control)


def _without_recompute(options: Options, why: str, names: Names, *, is_asked: bool) -> Options:
    """Return options for layers that cannot be recomputed. Raises `EppError` if offload is asked for, which needs recompute."""
    if is_asked:
        raise EppError(f"{names['offload']} takes the place of recompute, and plans recompute no layers: {why}")
    if dist.get_rank() == 0:
        logger.warning("plans recompute no layers: %s", why)
    return replace(options, recompute=0, offload=False)


def _tell(plan: Plan, agreed: AgreedShapes, is_learnt: bool) -> None:
    predicted, sizes = plan.predicted, [sum(shape.lengths) for shape in agreed.shapes]
    num_layers = max(1, sum(plan.num_layers))  # 0 where no stage has a decoder
    spread = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    logger.info(
        "planned %d microbatches of %s tokens%s: %.1f ms, bubble %.1f%%, %.1f%% of layers recompute, %.1f%% of activations are "
        "offloaded, %d weight gradients are actions of their own, microbatches take %.1f MiB of a device",
        len(sizes),
        spread,
        "" if is_learnt else " in their own order, while costs are learnt",
        predicted.makespan_us / 1e3,
        100 * predicted.bubble_fraction,
        100 * sum(recompute.num_layers for row in plan.recompute for recompute in row) / (num_layers * len(sizes)),
        100 * offload_share(plan),
        sum(action.op is Op.W for row in plan.ranks for step in row for action in step.actions),
        max(agreed.num_bytes) / 2**20,
    )
