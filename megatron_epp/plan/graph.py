"""A plan as a graph over small integers, for code that walks it step by step.

The table of operations states what waits for what; `build_graph` applies it to a plan, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import NO_STEP, Floats, Integers, Listed, PlanColumns, columns_of, listed
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.operations import At, Collective, MessageKind, Need, needs_of, operation
from megatron_epp.plan.plan import AnyStep, Copy, Plan
from megatron_epp.plan.relations import ChunkLinks, resolve


class Link(NamedTuple):
    """Relation between two operations whose results travel: who makes them, who needs them, and how."""

    source: Op
    target: Op
    carries: MessageKind | Collective


class Transfer(NamedTuple):
    """Transfer of a step's result to other ranks, for one of the steps that need it; steps are numbers."""

    producer: int
    consumer: int
    source: Action
    target: Action
    carries: MessageKind | Collective
    time_us: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """All transfers between ranks, in the order of their producers, as columns."""

    producer: Integers  # numbers of the steps
    consumer: Integers  # numbers of the steps
    chunk: Integers
    source_site: Integers
    target_site: Integers
    link: Integers  # index in `links`
    time_us: Floats
    links: tuple[Link, ...]

    def __iter__(self) -> Iterator[Transfer]:
        columns = self.producer, self.consumer, self.chunk, self.source_site, self.target_site, self.link, self.time_us
        for producer, consumer, chunk, site, to_site, link, time_us in zip(*(row.tolist() for row in columns), strict=True):
            source, target, carries = self.links[link]
            yield Transfer(producer, consumer, Action(source, site, chunk), Action(target, to_site, chunk), carries, time_us)


@dataclass(frozen=True, slots=True)
class Graph:
    """All steps of a plan, each with the steps it waits for."""

    columns: PlanColumns
    listed: Listed
    links: Sequence[int]  # index of the link to the host, for every rank
    need_starts: Integers  # for each step, where its part of `needs` and `need_us` starts, and the end of the last
    needs: Integers  # the steps that each step waits for
    need_us: Floats  # time of the transfer between the two; zero if there is none
    transfers: Transfers

    @property
    def steps(self) -> list[AnyStep]:
        return self.columns.steps

    @property
    def tracks(self) -> list[range]:
        return self.columns.tracks

    @property
    def num_ranks(self) -> int:
        return self.columns.num_ranks

    def where(self, number: int) -> tuple[int, int]:
        return self.columns.where(number)

    def needs_of(self, number: int) -> list[tuple[int, float]]:
        """Steps that a step waits for, each with the time in microseconds of the transfer between them."""
        part = slice(self.need_starts[number], self.need_starts[number + 1])
        return list(zip(self.needs[part].tolist(), self.need_us[part].tolist(), strict=True))

    def without_copies(self) -> Graph:
        """The graph of compute and messages alone, with the same numbers."""
        count = self.columns.num_compute
        if count == len(self.steps):
            return self
        is_compute = self.needs[: self.need_starts[count]] < count
        starts = np.concatenate([[0], np.cumsum(is_compute)])[self.need_starts[: count + 1]]
        needs, need_us = self.needs[: len(is_compute)][is_compute], self.need_us[: len(is_compute)][is_compute]
        return replace(self, columns=self.columns.without_copies(), links=(), need_starts=starts, needs=needs, need_us=need_us)


def build_graph(plan: Plan) -> Graph:
    """Number the steps and link each to the steps it waits for.

    Raises `PlanError` if an action occurs twice, lacks one that it needs, or is of a chunk or stage that does not exist.
    """
    columns = columns_of(plan)
    steps = listed(plan, columns)
    for index in steps.unknown[:1]:
        action = columns.action(index)
        if not 0 <= action.chunk < len(plan.chunks):
            raise PlanError(f"{action} is of a chunk that the plan does not have; it has {len(plan.chunks)}")
        if not 0 <= action.stage < len(operation(action.op).sites(plan.placement)):
            raise PlanError(f"{action} is of a stage that the plan does not have; it has {plan.num_stages}")
        raise PlanError(f"{action} is in a list of the plan in which it does not belong")
    for index in steps.repeated[:1]:
        raise PlanError(f"{columns.action(index)} occurs more than once in the plan")
    return linked(plan, columns, steps)


def linked(plan: Plan, columns: PlanColumns, steps: Listed) -> Graph:
    """Link each step, whose actions occur once, to those it waits for. Raises `PlanError` where the plan lacks one."""
    relations = _Relations(plan, columns, steps)
    relations.add_issues()
    for op in columns.ops:
        relations.add(op)
    return relations.graph()


class _Pairs(NamedTuple):
    """Pairs of an action and one that it waits for."""

    waiting: Integers  # index of the action that waits
    need: Integers  # number of the step it waits for
    time_us: Floats
    link: Integers  # of the transfer, an index in `_Relations.links`; -1 if there is none
    site: Integers  # of the action it waits for
    chunk: Integers  # of the action it waits for


class _Relations:
    def __init__(self, plan: Plan, columns: PlanColumns, steps: Listed) -> None:
        self.plan, self.columns, self.listed = plan, columns, steps
        self.chunk_links, self.rank = ChunkLinks(plan.chunks, plan.loss_groups, plan.borrowed), columns.ranks()
        self.links: list[Link] = []
        self.pairs: list[_Pairs] = []
        self.lacking: list[tuple[int, Action]] = []

    def add_issues(self) -> None:
        columns, needed = self.columns, list[tuple[int, Action]]()
        for index in range(int(np.searchsorted(columns.step, columns.num_compute)), len(columns.step)):
            step = columns.steps[columns.step[index]]
            if isinstance(step, Copy) and step.after is not None:
                needed.append((index, step.after))
        for op in dict.fromkeys(need.op for _, need in needed):
            waiting, sites, chunks = (
                np.array([row], dtype=np.int64).ravel()
                for row in zip(*((index, need.stage, need.chunk) for index, need in needed if need.op is op), strict=True)
            )
            self._add(op, waiting, sites, chunks)

    def add(self, op: Op) -> None:
        columns, others = self.columns, dict[tuple[Need, int], Integers]()
        count = len(operation(op).sites(self.plan.placement))
        for site in range(count):
            for _, other, need in resolve(op, site, self.plan.placement):
                key = need, other if need.site is At.EVERY else 0
                others.setdefault(key, np.full(count, -1))[site] = other
        actions, order = columns.of(op), needs_of(op)
        for need, other_site in sorted(others, key=lambda key: (order.index(key[0]), key[1])):
            other_of = others[need, other_site]
            if need.op not in columns.ops and need.if_present:
                continue
            waiting = actions[other_of[columns.site[actions]] >= 0]
            which, chunks = self.chunk_links.of_all(need.chunk, columns.chunk[waiting])
            waiting = waiting[which]
            self._add(need.op, waiting, other_of[columns.site[waiting]], chunks, op, need)

    def _add(
        self, source: Op, waiting: Integers, sites: Integers, chunks: Integers, op: Op | None = None, need: Need | None = None
    ) -> None:
        """Add pairs for an operation that waits, and its relation; None for the issue of copies."""
        table = self.listed.numbers.get(source, np.zeros((0, 0), dtype=np.int64))
        steps = np.full(len(sites), NO_STEP)
        is_known = (sites >= 0) & (sites < table.shape[0]) & (chunks >= 0) & (chunks < table.shape[1])
        steps[is_known] = table[sites[is_known], chunks[is_known]]
        is_there = steps != NO_STEP
        if not is_there.all():
            if need is None or not need.if_present:
                first = int(np.argmin(is_there))
                self.lacking.append((int(waiting[first]), Action(source, int(sites[first]), int(chunks[first]))))
            waiting, sites, chunks, steps = (column[is_there] for column in (waiting, sites, chunks, steps))
        time_us, link = np.zeros(len(waiting)), np.full(len(waiting), -1)
        if need is not None and op is not None and need.carries is not None:
            moves = self.rank[steps] != self.rank[self.columns.step[waiting]]
            if isinstance(need.carries, Collective):
                moves[:] = True
            link[moves] = len(self.links)
            self.links.append(Link(source, op, need.carries))
            boundaries = np.minimum(sites, self.columns.site[waiting])[moves]
            time_us[moves] = self.plan.messages.times_of(need.carries, boundaries, chunks[moves])
        self.pairs.append(_Pairs(waiting, steps, time_us, link, sites, chunks))

    def graph(self) -> Graph:
        """Return the graph. Raises `PlanError` if an action needs one that the plan lacks."""
        columns, plan = self.columns, self.plan
        if self.lacking:
            index, needed = min(self.lacking, key=itemgetter(0))
            raise PlanError(f"{columns.action(index)} needs {needed}, which the plan does not have")
        empty = np.zeros(0, dtype=np.int64)
        none = _Pairs(empty, empty, np.zeros(0), empty, empty, empty)
        joined = list(map(np.concatenate, zip(none, *self.pairs, strict=True)))
        order = np.argsort(joined[0], kind="stable")  # pairs of one action stay in the order of the table
        pairs = _Pairs(*(column[order] for column in joined))
        step = columns.step[pairs.waiting]
        starts = np.searchsorted(step, np.arange(len(columns.steps) + 1))
        moved = np.flatnonzero(pairs.link >= 0)
        moved = moved[np.argsort(pairs.need[moved], kind="stable")]
        transfers = Transfers(
            pairs.need[moved],
            step[moved],
            pairs.chunk[moved],
            pairs.site[moved],
            columns.site[pairs.waiting[moved]],
            pairs.link[moved],
            pairs.time_us[moved],
            tuple(self.links),
        )
        links = plan.host_links or range(plan.num_ranks)
        return Graph(columns, self.listed, links, starts, pairs.need, pairs.time_us, transfers)
