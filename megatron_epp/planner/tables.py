"""The costs of one chunk table, computed once and read many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pkgutil import resolve_name
from typing import Any

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import ChunkWork, TimeColumn, joined_work, work_of
from megatron_epp.features import batch_target
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Op, Plan, Recompute
from megatron_epp.plan.operations import Collective, MessageKind, OperationRows, Track, operation, operations
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.recompute import FULL_ONLY
from megatron_epp.planner.kernels.codes import ADDED, KINDS, Kinds
from megatron_epp.planner.kernels.compiled import IntegerList, Numbers, floats, integers
from megatron_epp.planner.kernels.pass_table import PassTable, by_node, need_columns
from megatron_epp.planner.message_room import message_room
from megatron_epp.planner.passes import StagePasses, passes_of, passes_of_each, recompute_of

Times = list[list[float]]
Sizes = list[list[int]]


@dataclass(frozen=True, slots=True)
class Tables:
    """Times in microseconds and sizes in bytes of a chunk table, and the ranks and links that they are for."""

    # Of each stage, as columns by chunk. In the planners, counts of layers are counts of recompute steps.
    passes: tuple[StagePasses, ...]
    hops: tuple[TimeColumn, ...]  # time of each chunk's message, boundary by boundary; zero where both stages are on one rank
    # Bytes of each rank held throughout: its static bytes, the working memory of its largest pass, and rooms
    static: tuple[int, ...]
    message_bytes: tuple[int, ...]  # of each chunk's message
    message_room: tuple[int, ...]  # bytes of each rank set aside for messages in flight while the order is not known
    added_room: tuple[int, ...]  # bytes of each rank set aside for added operations (`Operation.room`)
    exchange_room: tuple[int, ...]  # bytes of each rank for the exchange of its largest chunk with experts
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    # host_latency_us, host_us_per_byte: of a copy to the host or back; infinite where there is no link
    host_latency_us: float
    host_us_per_byte: float
    host_links: tuple[int, ...]  # of every rank, the link to the host that it copies over
    offloadable_share: float  # most of a chunk's kept bytes that may leave
    added: dict[Op, OperationRows] = field(default_factory=dict)
    _columns: dict[Kinds, PassTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    _derived: dict[Callable[[Tables], Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def trains(self) -> bool:
        return self.passes[0].trains

    @property
    def num_layers(self) -> tuple[int, ...]:
        return tuple(passes.num_layers for passes in self.passes)

    def once[T](self, function: Callable[[Tables], T]) -> T:
        """Return what a function computes from the tables, computed on the first use; it must not be changed."""
        if function not in self._derived:
            self._derived[function] = function(self)
        value: T = self._derived[function]
        return value

    @property
    def columns(self) -> PassTable:
        return self.columns_with(KINDS)

    def columns_with(self, kinds: Kinds) -> PassTable:
        """Flat columns for orders of some kinds of action, made on the first use."""
        if kinds not in self._columns:
            self._columns[kinds] = columns_of(self, kinds)
        return self._columns[kinds]

    @property
    def num_chunks(self) -> int:
        return len(self.passes[0].forward_us)

    def transfer_us(self, carries: MessageKind | Collective | None, boundary: int) -> Sequence[float] | TimeColumn:
        """Time by chunk of a transfer. Of added operations it counts even on one rank, which depends on the order."""
        if isinstance(carries, MessageKind) and carries.times:
            return self.hops[boundary]
        if isinstance(carries, MessageKind):
            return next(rows.message_us[carries.send] for rows in self.added.values() if carries.send in rows.message_us)
        times = (rows.collective_us[carries.op] for rows in self.added.values() if carries and carries.op in rows.collective_us)
        return next(times, np.zeros(self.num_chunks))

    @property
    def turn_us(self) -> list[float]:
        """Least time by chunk between the last stage's forward and its backward, in which added operations run."""
        turns = (operation(op).turn for op in self.added)
        times: list[float] = next((resolve_name(turn)(self.added) for turn in turns if turn), [0.0] * self.num_chunks)
        return times

    def host_us(self, num_bytes: int) -> float:
        return self.host_latency_us + self.host_us_per_byte * num_bytes

    def recompute(self, stage: int, chunk: int, num_steps: int) -> Recompute:
        if not num_steps:
            return NO_RECOMPUTE
        passes = self.passes[stage]
        return recompute_of(tuple(passes.frontier.mode[:, chunk].tolist()), passes.num_layers, num_steps)

    def kept_bytes(self, stage: int, chunk: int, num_steps: int) -> int:
        """Bytes that a chunk keeps, without states, which no copy to the host moves."""
        return int(self.passes[stage].ways.kept_bytes[chunk, num_steps] - self.passes[stage].handed[chunk])

    def layer_input(self, stage: int, chunk: int) -> int:
        """Bytes of the input of one layer, the least that is copied to the host."""
        return int(self.passes[stage].layer_input[chunk])


def columns_of(tables: Tables, kinds: Kinds) -> PassTable:
    passes, chunks = tables.passes, tables.num_chunks
    added = [tables.added[op] for op in kinds[ADDED:]]
    num_items = chunks * max([len(passes), *(len(rows.time_us) for rows in added)])
    need_starts, needs, need_us = need_columns(kinds, tables.rank_of, num_items, chunks, tables.transfer_us)
    distinct = {own: own.ways for own in passes}
    starts = dict(zip(distinct, accumulate((ways.kept_bytes.size for ways in distinct.values()), initial=0), strict=False))
    first_way = [starts[own] + distinct[own].kept_bytes.shape[1] * np.arange(chunks) for own in passes]
    by_way = [np.concatenate([rows.ravel() for rows in columns]) for columns in zip(*distinct.values(), strict=True)]

    def joined(rows: Iterable[Numbers]) -> IntegerList:
        return integers(np.concatenate([*rows]))

    times_us = [[own.forward_us for own in passes], [own.backward_us for own in passes], [own.weight_us for own in passes]]
    return PassTable(
        num_stages=len(passes),
        num_chunks=chunks,
        num_items=num_items,
        rank_of=integers(tables.rank_of),
        static=integers(tables.static),
        num_layers=integers(np.repeat(tables.num_layers, chunks)),
        most=joined(own.most for own in passes),
        first_way=joined(first_way),
        kept_bytes=integers(by_way[0]),
        again_us=floats(by_way[1]),
        whole=integers(by_way[2]),
        split=integers(by_way[3]),
        price=floats(by_way[4]),
        dear_us=floats(np.concatenate([own.frontier.layer_us.max(axis=0) for own in passes])),
        forward_alloc=joined(own.forward_alloc for own in passes),
        forward_free=joined(own.forward_free for own in passes),
        backward_residual=joined(own.backward_residual for own in passes),
        weight_bytes=joined(own.weight_bytes for own in passes),
        need_starts=need_starts,
        needs=needs,
        need_us=need_us,
        action_us=floats(by_node([*times_us, *(rows.time_us for rows in added)], num_items, np.float64)),
        saved_by_split_us=floats(np.concatenate([own.saved_by_split_us for own in passes])),
        added_takes=integers(by_node([rows.takes for rows in added], num_items, np.int64)),
        added_gives=integers(by_node([rows.gives for rows in added], num_items, np.int64)),
    )


def tabulate(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    modes: Sequence[str] = FULL_ONLY,
    work: ChunkWork | None = None,
    of_stages: Mapping[int, StagePasses] | None = None,
) -> Tables:
    """Evaluate the costs of every stage and chunk; `of_stages` are passes of the first of equal stages."""
    work, trains = work_of_table(chunks, problem) if work is None else work, not problem.forward_only
    equal_stages = costs.equal_stages_of(work)
    if of_stages is None:
        of_stages = {stage: passes_of(stage, work, costs, modes, forward_only=not trains) for stage in set(equal_stages)}
    passes = tuple(of_stages[stage] for stage in equal_stages)
    added = _added(problem, costs, work)
    message_us, message_bytes = costs.message_us(work), costs.message_bytes(work).tolist()
    rooms = [resolve_name(target)(added, trains) for op in added if (target := operation(op).room)]
    of_added: tuple[int, ...] = tuple(map(sum, zip(*rooms, strict=True))) or (0,) * problem.num_ranks
    room, exchanges = message_room(problem, message_bytes), (int(costs.exchange_bytes(work).max()),) * problem.num_ranks
    placement, one_us = problem.placement, costs.host_us(1e9)
    stages_of = tuple(tuple(s for s in range(problem.num_stages) if placement[s] == rank) for rank in range(max(placement) + 1))
    return Tables(
        passes=passes,
        hops=tuple(message_us if here != there else np.zeros(len(chunks)) for here, there in pairwise(placement)),
        static=tuple(
            sum(static_items(own, work, costs).values(), sum(more))
            for own, *more in zip(stages_of, room, of_added, exchanges, strict=True)
        ),
        message_bytes=tuple(message_bytes),
        message_room=room,
        added_room=of_added,
        exchange_room=exchanges,
        rank_of=placement,
        stages_of=stages_of,
        host_latency_us=costs.host_us(0),
        host_us_per_byte=(costs.host_us(2e9) - one_us) / 1e9 if one_us < np.inf else np.inf,
        host_links=tuple(rank // costs.host_turns for rank in range(len(stages_of))),
        offloadable_share=costs.offloadable_share,
        added=added,
    )


def work_of_table(chunks: Sequence[Chunk], problem: Problem) -> ChunkWork:
    return work_of_batch(problem, chunks, problem.trained, problem.spans)


def work_of_batch(batch: Problem | Plan, chunks: Sequence[Chunk], *facts: Any) -> ChunkWork:
    """Derive the work of chunks of a batch; `facts` are the last arguments of `work_of`."""
    sizes, make = (batch.lengths, batch.token_multiple), batch_target(batch, "work")
    work: ChunkWork = work_of(chunks, *sizes, *facts) if make is None else make(chunks, batch, *sizes, *facts)
    return work


def tabulate_each(
    chunks: Sequence[tuple[Chunk, ...]], problems: Sequence[Problem], costs: Costs, modes: Sequence[str]
) -> list[Tables]:
    """Tabulate a table of every replica in lockstep: modes come in one order, and each saves more than the one before."""
    works = [*map(work_of_table, chunks, problems)]
    stages, joined = set(costs.equal_stages_of(works[0])), joined_work(works)
    each = {stage: [*passes_of_each(stage, works, joined, costs, modes, problems[0].forward_only)] for stage in stages}
    own = [{stage: of_all[at] for stage, of_all in each.items()} for at in range(len(works))]
    every = zip(chunks, problems, works, own, strict=True)
    return [tabulate(table, problem, costs, modes, work, passes) for table, problem, work, passes in every]


def _added(problem: Problem, costs: Costs, work: ChunkWork) -> dict[Op, OperationRows]:
    """Tabulate the added operations that the costs know; in a forward-only plan they leave nothing."""
    added = {}
    for kind in operations(Track.COMPUTE):
        rows = None if kind.rows is None else kind.rows(costs, kind.sites(problem.placement), work)
        if rows is not None:
            added[kind.op] = rows._replace(gives=rows.takes) if problem.forward_only else rows
    return added


def static_items(stages: Sequence[int], work: ChunkWork, costs: Costs) -> dict[str, int]:
    """Compute the bytes by item that a rank holds throughout, with room for its largest pass; passes run one at a time."""
    items: Counter[str] = Counter()
    for stage in stages:
        items.update(costs.static_items(stage))
    passes = [{name: int(row.max(initial=0)) for name, row in costs.pass_items(stage, work).items()} for stage in stages]
    return dict(items) | max(passes, key=lambda sizes: sum(sizes.values()))
