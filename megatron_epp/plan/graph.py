"""Dependencies between actions, and a plan as a graph over small integers.

The table of operations states what waits for what. Here it is resolved for a placement and a chunk table (`deps`), once for all
code that walks a plan action by action (`build_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, slice_neighbours
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.operations import At, Collective, Message, Need, Of, needs_of, operation
from megatron_epp.plan.plan import AnyStep, Copy, Plan

Needs = Callable[[Action], list[Action]]


class Resolved(NamedTuple):
    """A relation of the actions of one operation and site to those of another."""

    op: Op
    site: int
    need: Need


def resolve(op: Op, site: int, placement: Sequence[int]) -> Iterator[Resolved]:
    """Yield the relations of an operation at one of its sites.

    Args:
        op: the operation that waits.
        site: its site, such as a stage.
        placement: the rank of every stage.
    """
    last = len(operation(op).sites(placement)) - 1
    for need in needs_of(op):
        if need.only is At.LAST and site != last:
            continue
        count = len(operation(need.op).sites(placement))
        if need.site is At.EVERY:
            yield from (Resolved(need.op, other, need) for other in range(count))
            continue
        other = count - 1 if isinstance(need.site, At) else site + need.site
        if 0 <= other < count:
            yield Resolved(need.op, other, need)


class ChunkLinks:
    """Chunks that a dependency can concern: neighbouring slices, and those whose loss is computed together."""

    def __init__(self, chunks: Sequence[Chunk], loss_groups: Sequence[Sequence[int]] = ()) -> None:
        neighbours = slice_neighbours(chunks)
        self._previous, self._following = neighbours.previous, neighbours.following
        self._groups = {chunk: tuple(group) for group in loss_groups for chunk in group}

    def of(self, which: Of, chunk: int) -> Sequence[int]:
        """List the chunks that a relation of a chunk concerns."""
        if which is Of.SAME:
            return (chunk,)
        if which is Of.GROUP:
            return [other for other in self._groups.get(chunk, ()) if other != chunk]
        other = (self._previous if which is Of.PREVIOUS else self._following)[chunk]
        return () if other is None else (other,)


def deps(
    chunks: Sequence[Chunk],
    num_stages: int,
    optional: Collection[Action] = (),
    placement: Sequence[int] = (),
    loss_groups: Sequence[Sequence[int]] = (),
) -> Needs:
    """Build the function from an action to the actions it waits for.

    Args:
        chunks: the chunk table.
        num_stages: stages of the pipeline.
        optional: the actions of the plan for which others wait only if it has them, such as `R` and `L` before a backward.
        placement: the rank of every stage; of use for operations whose sites are not stages.
        loss_groups: groups of chunks whose loss is computed together (`Plan.loss_groups`).

    Returns:
        ``needs(action)``: the actions that must have ended before it starts. Where a transfer is between the two
        (`Need.carries`), it must have arrived as well.
    """
    links, present = ChunkLinks(chunks, loss_groups), frozenset(optional)
    where = tuple(placement or range(num_stages))
    relations = lru_cache(maxsize=None)(lambda op, site: tuple(resolve(op, site, where)))

    def needs(action: Action) -> list[Action]:
        return [
            found
            for op, site, need in relations(action.op, action.stage)
            for chunk in links.of(need.chunk, action.chunk)
            if (found := Action(op, site, chunk)) in present or not need.if_present
        ]

    return needs


class Transfer(NamedTuple):
    """Transfer of a step's result to other ranks, for one of the steps that need it.

    Attributes:
        producer, consumer: numbers of the steps.
        source, target: the producing and the needing action of these.
        carries: the kind of transfer.
        time_us: its time.
    """

    producer: int
    consumer: int
    source: Action
    target: Action
    carries: Message | Collective
    time_us: float


@dataclass(frozen=True, slots=True)
class Graph:
    """All steps of a plan, numbered along the tracks.

    A track is a list that runs one step at a time: the compute list of every rank, then the copy list of every rank.

    Attributes:
        steps: the steps of all tracks, track after track.
        tracks: the numbers of each track's steps.
        num_ranks: tracks of compute; copies of rank ``r`` are track ``num_ranks + r``.
        links: index of the link to the host, for every rank.
        index: number of the step of each action.
        needs: for each step, the steps it waits for and the time in microseconds of the transfer between them (zero if none).
        transfers: all transfers between ranks, in the order of their producers.
    """

    steps: list[AnyStep]
    tracks: list[range]
    num_ranks: int
    links: Sequence[int]
    index: dict[Action, int]
    needs: list[list[tuple[int, float]]]
    transfers: list[Transfer]

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
        index = {action: number for action, number in self.index.items() if number < count}
        needs = [[(need, message_us) for need, message_us in links if need < count] for links in self.needs[:count]]
        return Graph(steps, self.tracks[: self.num_ranks], self.num_ranks, (), index, needs, self.transfers)


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
    index: dict[Action, int] = {}
    for number, step in enumerate(steps):
        for action in step.actions:
            if index.setdefault(action, number) != number or action in step.actions[: step.actions.index(action)]:
                raise PlanError(f"{action} occurs more than once in the plan")
    needs, transfers = _Linker(plan, index).link(steps)
    return Graph(steps, tracks, plan.num_ranks, plan.host_links or range(plan.num_ranks), index, needs, transfers)


class _Relation(NamedTuple):
    """A resolved relation with its transfer, None if both sides share a rank, and the times of that, by chunk."""

    op: Op
    site: int
    chunk: Of
    carries: Message | Collective | None
    times_us: Sequence[float]
    if_present: bool


class _Linker:
    """Evaluation of the table of operations for the steps of a plan."""

    def __init__(self, plan: Plan, index: dict[Action, int]) -> None:
        self._plan, self._index = plan, index
        self._links = ChunkLinks(plan.chunks, plan.loss_groups)
        self._relations: dict[tuple[Op, int], list[_Relation]] = {}

    def link(self, steps: Sequence[AnyStep]) -> tuple[list[list[tuple[int, float]]], list[Transfer]]:
        """List the needs of every step, and the transfers between ranks."""
        needs, transfers = [], []
        for number, step in enumerate(steps):
            links: list[tuple[int, float]] = []
            if isinstance(step, Copy) and step.after is not None:
                links.append((self._number(step.after, step.action), 0.0))
            for action in step.actions:
                for need, source, carries, time_us in self._needs(action):
                    if need != number:
                        links.append((need, time_us))
                        if carries is not None:
                            transfers.append(Transfer(need, number, source, action, carries, time_us))
            needs.append(links)
        transfers.sort(key=lambda transfer: transfer.producer)
        return needs, transfers

    def _needs(self, action: Action) -> Iterator[tuple[int, Action, Message | Collective | None, float]]:
        op, site, chunk = action
        relations = self._relations.get((op, site))
        if relations is None:
            relations = self._relations[op, site] = list(self._related(op, site))
        same, index = Of.SAME, self._index
        for other, at, which, carries, times_us, if_present in relations:
            for c in (chunk,) if which is same else self._links.of(which, chunk):
                number = index.get(need := Action(other, at, c))
                if number is not None:
                    yield number, need, carries, times_us[c] if times_us else 0.0
                elif not if_present:
                    self._number(need, action)

    def _number(self, need: Action, action: Action) -> int:
        number = self._index.get(need)
        if number is None:
            raise PlanError(f"{action} needs {need}, which the plan does not have")
        return number

    def _related(self, op: Op, site: int) -> Iterator[_Relation]:
        plan = self._plan
        here = operation(op).sites(plan.placement)[site]
        for other, at, need in resolve(op, site, plan.placement):
            if need.chunk is Of.GROUP and not plan.loss_groups:
                continue
            carries = need.carries
            times_us: Sequence[float] = ()
            if isinstance(carries, Message):
                if operation(other).sites(plan.placement)[at] == here:
                    carries = None
                else:
                    times_us = getattr(plan.messages, carries.times)[min(at, site)]
            elif carries is not None:
                times_us = plan.messages.collective_times(carries.op)
            yield _Relation(other, at, need.chunk, carries, times_us, need.if_present)
