"""Stages that take longer than their costs say, iteration after iteration, and what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron_epp.plan import Action, Plan, simulate
from megatron_epp.plan.operations import of_stages, operation

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
