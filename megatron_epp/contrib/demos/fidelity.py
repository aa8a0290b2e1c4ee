"""Attribution of the difference between a run and its plan: times of actions, gaps between them, other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.operations import is_compute
from megatron_epp.plan.plan import Plan, Step
from megatron_epp.plan.serialize import load
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Event, Measured

RECOMPUTING = "B with recompute"
"""Kind of a backward in which layers run their forward again; other kinds are named as their op."""


@dataclass(frozen=True, slots=True)
class Took:
    """All actions of one kind, over all ranks: how many, and microseconds. `cpu_us` is None where it was not taken."""

    count: int
    planned_us: float
    measured_us: float
    cpu_us: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One iteration, planned and measured.

    Attributes:
        planned_us: makespan as planned.
        measured_us: makespan as measured.
        replayed_us: makespan of the plan when every action takes what it took. What lies between this and `measured_us`
            happened between the actions: messages, and the host.
        undisturbed_us: the same with the actions' processor times: without what other programs, or other threads of this one,
            took of its cores inside an action. None where these times were not taken.
        kinds: sums by kind of action.
    """

    planned_us: float
    measured_us: float
    replayed_us: float
    undisturbed_us: float | None
    kinds: dict[str, Took]

    @property
    def taken_us(self) -> float:
        """Share of the makespan that other programs took inside actions."""
        return 0.0 if self.undisturbed_us is None else self.replayed_us - self.undisturbed_us

    @property
    def error(self) -> float:
        """``planned / measured - 1``."""
        return self.planned_us / self.measured_us - 1


def traces(folder: Path, iterations: int) -> list[tuple[Plan, Measured]]:
    """Plan and times of every iteration of a run."""
    numbers = range(1, iterations + 1)
    return [(load(folder / f"plan-{i}.json"), Measured.load(folder / f"measured-{i}.json")) for i in numbers]


def compare(plan: Plan, measured: Measured) -> Comparison:
    """Compare a run with its plan.

    Raises:
        PlanError: the measurement lacks an action of the plan.
    """
    events = {event.action: event for row in measured.ranks for event in row if is_compute(event.action.op)}
    for rank in range(plan.num_ranks):
        for action in plan.actions(rank):
            if action not in events:
                raise PlanError(f"the measurement, of plan {measured.plan_digest[:12]}, has no {action}: it is of another plan")
    has_cpu = all(event.cpu_us is not None for event in events.values())
    return Comparison(
        planned_us=simulate(plan).makespan_us,
        measured_us=measured.makespan_us,
        replayed_us=_replayed_us(plan, events, lambda event: event.took_us),
        undisturbed_us=_replayed_us(plan, events, lambda event: event.cpu_us or 0.0) if has_cpu else None,
        kinds=_kinds(plan, events, has_cpu),
    )


def _replayed_us(plan: Plan, events: dict[Action, Event], took_us: Callable[[Event], float]) -> float:
    def of_step(step: Step) -> float:
        """Return the time of a step; two actions that take turns overlap."""
        times = [events[action] for action in step.actions]
        span_us = max(event.end_us for event in times) - min(event.start_us for event in times)
        return min(sum(map(took_us, times)), span_us) if step.also else took_us(times[0])

    ranks = tuple(tuple(step._replace(time_us=of_step(step)) for step in steps) for steps in plan.ranks)
    return simulate(replace(plan, ranks=ranks)).makespan_us


def _kinds(plan: Plan, events: dict[Action, Event], has_cpu: bool) -> dict[str, Took]:
    took: dict[str, Took] = {}
    for step in (step for steps in plan.ranks for step in steps):
        op, stage, chunk = step.action
        event = events[step.action]
        kind = RECOMPUTING if op is Op.B and any(plan.recompute[stage][chunk]) else str(op)
        old = took.get(kind, Took(0, 0.0, 0.0, 0.0 if has_cpu else None))
        cpu_us = None if old.cpu_us is None else old.cpu_us + (event.cpu_us or 0.0)
        took[kind] = Took(old.count + 1, old.planned_us + step.time_us, old.measured_us + event.took_us, cpu_us)
    return took
