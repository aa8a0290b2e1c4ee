"""Dependencies between actions, and a plan as a graph over small integers.

The table of operations states what waits for what. Here it is resolved for a placement and a chunk table (`deps`), once for all
code that walks a plan action by action (`build_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
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


class Link(NamedTuple):
    """Relation between two operations at their sites whose results travel: who makes them, who needs them, how, and when."""

    source: tuple[Op, int]
    target: tuple[Op, int]
    carries: Message | Collective
    times_us: Sequence[float]


class Transfer(NamedTuple):
    """Transfer of a step's result to other ranks, for one of the steps that need it.

    Attributes:
        producer, consumer: numbers of the steps.
        chunk: of both.
        link: the relation between them.
    """

    producer: int
    consumer: int
    chunk: int
    link: Link

    @property
    def source(self) -> Action:
        """The producing action."""
        return Action(*self.link.source, self.chunk)

    @property
    def target(self) -> Action:
        """The action that needs the other."""
        return Action(*self.link.target, self.chunk)

    @property
    def carries(self) -> Message | Collective:
        """Message or collective that carries the dependency."""
        return self.link.carries

    @property
    def time_us(self) -> float:
        """Time of the transfer."""
        return self.link.times_us[self.chunk] if self.link.times_us else 0.0


@dataclass(frozen=True, slots=True)
class Graph:
    """All steps of a plan, numbered along the tracks.

    A track is a list that runs one step at a time: the compute list of every rank, then the copy list of every rank.

    Attributes:
        steps: the steps of all tracks, track after track.
        tracks: the numbers of each track's steps.
        num_ranks: tracks of compute; copies of rank ``r`` are track ``num_ranks + r``.
        links: index of the link to the host, for every rank.
        rows: by operation and site, the number of the step of each chunk; -1 if the plan has none.
        needs: for each step, the steps it waits for and the time in microseconds of the transfer between them (zero if none).
        transfers: all transfers between ranks, in the order of their producers.
    """

    steps: list[AnyStep]
    tracks: list[range]
    num_ranks: int
    links: Sequence[int]
    rows: dict[tuple[Op, int], list[int]]
    needs: list[list[tuple[int, float]]]
    transfers: list[Transfer]

    def number(self, action: Action) -> int | None:
        """Number of the step of an action; None if the plan does not have it."""
        op, site, chunk = action
        row = self.rows.get((op, site))
        found = -1 if row is None else row[chunk]
        return None if found < 0 else found

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
        rows = {key: [number if number < count else -1 for number in row] for key, row in self.rows.items()}
        needs = [[(need, message_us) for need, message_us in links if need < count] for links in self.needs[:count]]
        return Graph(steps, self.tracks[: self.num_ranks], self.num_ranks, (), rows, needs, self.transfers)


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
    numbers: dict[tuple[Op, int], list[int]] = {}
    chunks = len(plan.chunks)
    for number, step in enumerate(steps):
        for action in step.actions:
            op, site, chunk = action
            row = numbers.get((op, site))
            if row is None:
                row = numbers[op, site] = [-1] * chunks
            if not 0 <= chunk < chunks:
                raise PlanError(f"{action} is of a chunk that the plan does not have; it has {chunks}")
            if row[chunk] >= 0:
                raise PlanError(f"{action} occurs more than once in the plan")
            row[chunk] = number
    graph = Graph(steps, tracks, plan.num_ranks, plan.host_links or range(plan.num_ranks), numbers, [], [])
    _link(plan, graph)
    return graph


class _Relation(NamedTuple):
    """A resolved relation.

    Attributes:
        row: numbers of the steps that it concerns, by chunk.
        which: their chunk, relative to the waiting action's.
        times_us: of the transfer between them, by chunk; empty if there is none, or it takes no time.
        link: of the transfer; None if there is none.
        op, site: of the steps.
        if_present: as in `Need`.
    """

    row: list[int]
    which: Of
    times_us: Sequence[float]
    link: Link | None
    op: Op
    site: int
    if_present: bool


def _link(plan: Plan, graph: Graph) -> None:
    """Fill a graph's `needs` and `transfers` from the table of operations."""
    relations: dict[tuple[Op, int], list[_Relation]] = {}
    rank_of = [rank for track, numbers in enumerate(graph.tracks) for rank in [track % graph.num_ranks] * len(numbers)]
    links, same = ChunkLinks(plan.chunks, plan.loss_groups), Of.SAME
    for number, step in enumerate(graph.steps):
        found: list[tuple[int, float]] = []
        if isinstance(step, Copy) and step.after is not None:
            found.append((_required(graph, step.after, step.action), 0.0))
        for action in step.actions:
            op, site, own = action
            related = relations.get((op, site))
            if related is None:
                related = relations[op, site] = list(_related(plan, graph, op, site))
            for row, which, times_us, link, other, at, if_present in related:
                for chunk in (own,) if which is same else links.of(which, own):
                    need = row[chunk]
                    if need < 0:
                        if not if_present:
                            _required(graph, Action(other, at, chunk), action)
                    else:
                        moves = link is not None and (rank_of[need] != rank_of[number] or isinstance(link.carries, Collective))
                        found.append((need, times_us[chunk] if moves and times_us else 0.0))
                        if moves and link is not None:
                            graph.transfers.append(Transfer(need, number, chunk, link))
        graph.needs.append(found)
    graph.transfers.sort(key=itemgetter(0))


def _related(plan: Plan, graph: Graph, op: Op, site: int) -> Iterator[_Relation]:
    nothing = [-1] * len(plan.chunks)
    for other, at, need in resolve(op, site, plan.placement):
        if need.chunk is Of.GROUP and not plan.loss_groups:
            continue
        carries = need.carries
        times_us: Sequence[float] = ()
        if isinstance(carries, Message):
            times_us = plan.messages.times_of(carries, min(at, site))
        elif carries is not None:
            times_us = plan.messages.collective_times(carries.op)
        link = None if carries is None else Link((other, at), (op, site), carries, times_us)
        yield _Relation(graph.rows.get((other, at), nothing), need.chunk, times_us, link, other, at, need.if_present)


def _required(graph: Graph, need: Action, action: Action) -> int:
    number = graph.number(need)
    if number is None:
        raise PlanError(f"{action} needs {need}, which the plan does not have")
    return number
