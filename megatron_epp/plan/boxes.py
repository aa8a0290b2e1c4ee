"""Planned and measured iterations in one form: boxes, which pictures and traces draw."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.document import digest
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.operations import Track, operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import brief_text
from megatron_epp.plan.simulation import Timeline

_FAR = 2.0
"""Largest ratio of the makespans of a plan and a run of it for which pictures have one time axis."""
FAR_WITH_ZOOM = 10.0
"""The same for pages, where a reader can zoom in."""
COMPUTE, COPY, LINK = "compute", "copy", "link"
"""Streams of a rank."""


def far_from(plan: Plan, measured: Measured, ratio: float = _FAR) -> bool:
    """True if a time axis for both a plan and a run of it would squeeze one of them, to less than one part in `ratio`."""
    longest, shortest = (choose(plan.predicted.makespan_us, measured.makespan_us) for choose in (max, min))
    return 0.0 < ratio * shortest < longest


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
    if (plan_digest := digest(plan)) != measured.plan_digest:
        raise PlanError(f"the measurement is of plan {brief_text(measured.plan_digest[:12])}, this is plan {plan_digest[:12]}")
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


def recompute_in_backward(plan: Plan) -> dict[Action, float]:
    """Share of each backward's time that is recompute inside it, by action.

    Backwards without recompute, or with a separate `R`, are omitted.
    """
    steps = {action: step for rank in plan.ranks for step in rank for action in step.actions}
    shares = {}
    for stage, row in enumerate(plan.recompute_us):
        for chunk, again_us in enumerate(row):
            backward = steps.get(Action(Op.B, stage, chunk))
            if again_us > 0 and backward and backward.time_us > 0 and Action(Op.R, stage, chunk) not in steps:
                shares[Action(Op.B, stage, chunk)] = min(again_us / backward.time_us, 1.0)
    return shares
