"""Comparison of every training iteration with its plan: a stage that stays slower than its costs is named in the log."""

from __future__ import annotations

import logging
import socket
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.plan import Action, Plan
from megatron_epp.plan.operations import of_stages, operation
from megatron_epp.plan.plan_figures import is_calibrated
from megatron_epp.plan.simulation import simulate
from megatron_epp.runtime.links.objects import ObjectGroup
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.side_thread import SideThread, complete_at_end

if TYPE_CHECKING:
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

SLOWER = 1.25
"""Ratio of measured to planned time of a stage above which it counts as slow. Sums over an iteration's actions scatter by some
per cent and fitted lines miss single sizes by as much, while a device that throttles or shares its host loses a quarter."""
ITERATIONS = 10
"""Consecutive slow iterations after which a stage is named; ranks exchange what they found as often."""


@dataclass(slots=True)
class SlowStages:
    """Ratios of measured to planned time of one rank's stages, as long as they are above `SLOWER`."""

    _ratios: dict[int, list[float]] = field(default_factory=dict)

    def add(self, plan: Plan, rank: int, took_us: Iterable[tuple[Action, float]]) -> None:
        """Add a rank's measured times, but for actions of no stage, and those in one step, which take turns and last longer."""
        planned_us: dict[int, float] = {}
        alone = [step for step in plan.ranks[rank] if not step.also and _is_of_stage(step.action)]
        for step in alone:
            planned_us[step.action.stage] = planned_us.get(step.action.stage, 0.0) + step.time_us
        measured_us, counted = dict.fromkeys(planned_us, 0.0), {step.action for step in alone}
        for action, time_us in took_us:
            if action in counted:
                measured_us[action.stage] += time_us
        for stage, time_us in measured_us.items():
            ratio = time_us / planned_us[stage] if planned_us[stage] > 0 else 1.0
            self._ratios[stage] = [*self._ratios.get(stage, [])[1 - ITERATIONS :], ratio] if ratio > SLOWER else []

    @property
    def slow(self) -> dict[int, float]:
        """Median ratio of every stage that was slow in each of the last `ITERATIONS` iterations."""
        return {stage: statistics.median(some) for stage, some in self._ratios.items() if len(some) >= ITERATIONS}


def _is_of_stage(action: Action) -> bool:
    return operation(action.op).sites is of_stages


def slowed_us(plan: Plan, ratios: Mapping[int, float]) -> float:
    """Return the makespan of a plan, in microseconds, whose stages take longer by these ratios."""
    ranks = tuple(
        tuple(
            step._replace(time_us=step.time_us * ratios.get(step.action.stage, 1.0)) if _is_of_stage(step.action) else step
            for step in row
        )
        for row in plan.ranks
    )
    return simulate(replace(plan, ranks=ranks)).makespan_us


def stage_watch(run: Run) -> StageWatch:
    """Return the watch of a run, over plans by its costs: those of earlier costs are still on their way."""
    group = ObjectGroup.create(run.links.control.ranks, run.groups)
    return StageWatch(run.rank, group, lambda plan: is_calibrated(plan) and plan.costs == run.costs.name)


class StageWatch(RunFeature):
    """Watches the stages of a pipeline, in a thread. All ranks that run the same plans call `after` in the same iterations.

    The first rank of `group`, which are those and nothing else uses, writes the log.
    """

    reads_times = True

    def __init__(self, rank: int, group: ObjectGroup, judges: Callable[[Plan], bool] = lambda plan: True) -> None:
        self._rank, self._group, self._judges = rank, group, judges
        self._stages = SlowStages()
        self._thread = SideThread("epp-stage-watch")  # its collectives are on `group`, which no other thread uses
        self._last: Future[None] | None = None
        self._seen = 0
        self._told: set[tuple[int, int]] = set()

    def after(self, plan: Plan | None, recorder: Recorder, measured: Callable[[], Mapping[str, Any]]) -> None:
        """Begin to compare an iteration. Waits for the previous comparison, and raises its error."""
        if plan is None or not self._judges(plan):
            return
        self.complete()
        self._last = self._thread.submit(partial(self._compare, plan, recorder))

    def complete(self, limit_s: float | None = None) -> None:
        """Wait until the last iteration is compared. Raises the error of that, or `TimeoutError` after `limit_s` seconds."""
        if self._last is not None:
            self._last.result(limit_s)

    def close(self) -> None:
        complete_at_end(self.complete)

    def _compare(self, plan: Plan, recorder: Recorder) -> None:
        """Add an iteration, when the device has its times; every `ITERATIONS` iterations a collective call."""
        self._stages.add(plan, self._rank, recorder.took_us())
        self._seen += 1
        if self._seen % ITERATIONS == 0:
            everyone = self._group.from_each((dist.get_rank(), socket.gethostname(), self._stages.slow))
            if self._group.is_first:
                self._tell(plan, everyone)

    def _tell(self, plan: Plan, everyone: list[tuple[int, str, dict[int, float]]]) -> None:
        """Name slow stages that have not been named since they became slow."""
        slow = {(rank, stage): (host, ratio) for rank, host, ratios in everyone for stage, ratio in ratios.items()}
        new, self._told = slow.keys() - self._told, set(slow)
        if not new:
            return
        named = []
        for rank, stage in sorted(new):
            host, ratio = slow[rank, stage]
            named.append(
                f"rank {rank} on {host} takes {ratio:.2f} of the time of its costs for stage {stage} ("
                f"{slowed_us(plan, {stage: ratio}) / 1e3:.1f} ms an iteration by the plan, "
                f"{plan.predicted.makespan_us / 1e3:.1f} ms without)"
            )
        logger.warning("slower than costs for %d iterations: %s", ITERATIONS, "; ".join(named))
