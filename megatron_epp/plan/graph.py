"""A plan as a graph over small integers: `deps` is evaluated once, for all code that walks a plan action by action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.plan.action import COPY_OPS, Action, Op
from megatron_epp.plan.deps import deps
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import AnyStep, Copy, Plan

_OPTIONAL = COPY_OPS | {Op.R}


@dataclass(frozen=True, slots=True)
class Graph:
    """All steps of a plan, numbered along the tracks.

    A track is a list that runs one step at a time: the compute list of every rank, then the copy list of every rank.

    Attributes:
        steps: the steps of all tracks, track after track.
        tracks: the numbers of each track's steps.
        num_ranks: tracks of compute; copies of rank ``r`` are track ``num_ranks + r``.
        links: index of the link to the host, for every rank.
        index: number of each action.
        needs: for each step, the steps it waits for and the time in microseconds of the message between them (zero if none).
    """

    steps: list[AnyStep]
    tracks: list[range]
    num_ranks: int
    links: Sequence[int]
    index: dict[Action, int]
    needs: list[list[tuple[int, float]]]

    def where(self, number: int) -> tuple[int, int]:
        """Rank of a step, and its position in its track."""
        for track, numbers in enumerate(self.tracks):
            if number in numbers:
                return track % self.num_ranks, number - numbers.start
        raise IndexError(f"step {number} of a plan of {len(self.steps)}")

    def without_copies(self) -> Graph:
        """The graph of compute and messages alone, with the same numbers."""
        count = self.tracks[self.num_ranks - 1].stop
        if count == len(self.steps):
            return self
        steps = self.steps[:count]
        index = {step.action: number for number, step in enumerate(steps)}
        needs = [[(need, message_us) for need, message_us in links if need < count] for links in self.needs[:count]]
        return Graph(steps, self.tracks[: self.num_ranks], self.num_ranks, (), index, needs)


def receiver(plan: Plan, action: Action) -> int | None:
    """The stage on another rank that receives the result of an action as a message; None if there is none."""
    op, stage, _ = action
    to = stage + 1 if op is Op.F else stage - 1
    if op not in (Op.F, Op.B) or not 0 <= to < plan.num_stages or plan.placement[to] == plan.placement[stage]:
        return None
    return to


def build_graph(plan: Plan) -> Graph:
    """Number the steps and link each to the steps it waits for.

    Raises:
        PlanError: an action occurs twice, or needs one that the plan lacks.
    """
    steps: list[AnyStep] = []
    tracks: list[range] = []
    rows: list[tuple[AnyStep, ...]] = [*plan.ranks, *(plan.copies or ((),) * plan.num_ranks)]
    for track in rows:
        tracks.append(range(len(steps), len(steps) + len(track)))
        steps.extend(track)
    index = {step.action: number for number, step in enumerate(steps)}
    if len(index) < len(steps):
        twice = next(step.action for number, step in enumerate(steps) if index[step.action] != number)
        raise PlanError(f"{twice} occurs more than once in the plan")
    links = plan.host_links or range(plan.num_ranks)
    return Graph(steps, tracks, plan.num_ranks, links, index, list(_needs(plan, steps, index)))


def _needs(plan: Plan, steps: list[AnyStep], index: dict[Action, int]) -> Iterator[list[tuple[int, float]]]:
    ask = deps(plan.chunks, plan.num_stages, {step.action for step in steps if step.action.op in _OPTIONAL})
    placement = plan.placement
    table = {Op.F: plan.messages.activation_us, Op.B: plan.messages.gradient_us}
    for step in steps:
        action = step.action
        links = []
        issued_after = [step.after] if isinstance(step, Copy) and step.after is not None else []
        for need in (*issued_after, *ask(action)):
            number = index.get(need)
            if number is None:
                raise PlanError(f"{action} needs {need}, which the plan does not have")
            message_us = 0.0
            if need.stage != action.stage and placement[need.stage] != placement[action.stage]:
                message_us = table[need.op][min(need.stage, action.stage)][need.chunk]
            links.append((number, message_us))
        yield links
