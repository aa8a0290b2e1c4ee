"""Planned and measured iterations in one form: boxes on the time axis, which traces and pictures draw."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.plan.action import Action
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.operations import Track, operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.serialize import digest
from megatron_epp.plan.simulate import Timeline
from megatron_epp.report.measured import Measured

COMPUTE, COPY, LINK = "compute", "copy", "link"


class Box(NamedTuple):
    """One step on one stream of one rank, microseconds since the start of the iteration."""

    rank: int
    stream: str
    action: Action
    start_us: float
    end_us: float
    also: tuple[Action, ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        """The action and those that run in the same step."""
        return (self.action, *self.also)


def planned_boxes(timeline: Timeline) -> list[Box]:
    """Boxes of a simulated plan, compute then copies, in the order of each rank."""
    plan, boxes = timeline.plan, []
    times = (COMPUTE, timeline.start_us, timeline.end_us), (COPY, timeline.copy_start_us, timeline.copy_end_us)
    for (stream, starts, ends), (_, table) in zip(times, plan.tables, strict=True):
        for rank, steps in enumerate(table):
            boxes += [
                Box(rank, stream, step.action, starts[rank][i], ends[rank][i], step.actions[1:]) for i, step in enumerate(steps)
            ]
    return boxes


def measured_boxes(plan: Plan, measured: Measured) -> list[Box]:
    """Boxes of a run of the plan. Raises `PlanError` if the run was of another plan, or has actions that the plan lacks."""
    if (mine := digest(plan)) != measured.plan_digest:
        raise PlanError(f"the measurement is of plan {measured.plan_digest[:12]}, this is plan {mine[:12]}")
    if len(measured.ranks) != plan.num_ranks:
        raise PlanError(f"the measurement has {len(measured.ranks)} ranks, the plan has {plan.num_ranks}")
    for event in (event for events in measured.ranks for event in events):
        sites = operation(event.action.op).sites(plan.placement)
        if not (event.action.stage < len(sites) and event.action.chunk < len(plan.chunks)):
            raise PlanError(
                f"the measurement has {event.action}; the plan has {plan.num_stages} stages and {len(plan.chunks)} chunks"
            )
    return [Box(rank, _stream(e.action), e.action, e.start_us, e.end_us) for rank, es in enumerate(measured.ranks) for e in es]


def _stream(action: Action) -> str:
    track = operation(action.op).track
    return COMPUTE if track is Track.COMPUTE else COPY if track is Track.COPY else LINK
