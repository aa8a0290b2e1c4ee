"""A run next to its plan: makespans when every action takes the time that it took, and times by kind of action."""

from __future__ import annotations

from dataclasses import replace

from megatron_epp.plan import Action, Op, Plan
from megatron_epp.plan.operations import is_compute
from megatron_epp.plan.plan import Step
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Event, Measured

RECOMPUTING = "B with recompute"
"""Kind of a backward in which layers run their forward again; other kinds are named as their op."""


def replayed_us(plan: Plan, measured: Measured) -> float:
    """Makespan of the plan with measured times of actions. What lies between this and the measured makespan happened between
    the actions: messages, and the host.
    """
    events = _events(measured)

    def of_step(step: Step) -> float:
        """Return the time of a step; two actions that take turns overlap."""
        times = [events[action] for action in step.actions]
        span_us = max(event.end_us for event in times) - min(event.start_us for event in times)
        return min(sum(event.took_us for event in times), span_us)

    ranks = tuple(tuple(step._replace(time_us=of_step(step)) for step in steps) for steps in plan.ranks)
    return simulate(replace(plan, ranks=ranks)).makespan_us


def by_kind(plan: Plan, measured: Measured) -> dict[str, tuple[int, float, float]]:
    """Number of actions of each kind, over all ranks, and their microseconds planned and measured."""
    events, sums = _events(measured), dict[str, tuple[int, float, float]]()
    for step in (step for steps in plan.ranks for step in steps):
        op, stage, chunk = step.action
        kind = RECOMPUTING if op is Op.B and any(plan.recompute[stage][chunk]) else str(op)
        count, planned_us, measured_us = sums.get(kind, (0, 0.0, 0.0))
        sums[kind] = count + 1, planned_us + step.time_us, measured_us + events[step.action].took_us
    return sums


def _events(measured: Measured) -> dict[Action, Event]:
    return {event.action: event for row in measured.ranks for event in row if is_compute(event.action.op)}
