"""Costs of one chunk table as plain rows ``[stage][chunk]``, computed once and read many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import sub
from typing import Any

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
from megatron_epp.cost.work import joined_work
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Op, Recompute
from megatron_epp.plan.operations import Collective, MessageKind, OperationRows, Track, operations
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.recompute import FULL_ONLY
from megatron_epp.planner.kernels.codes import ADDED, KINDS, Kinds
from megatron_epp.planner.kernels.compiled import IntegerList, Numbers, floats, integers
from megatron_epp.planner.kernels.table_columns import Columns, by_node, need_columns, stacked
from megatron_epp.planner.message_room import message_room
from megatron_epp.planner.passes import StagePasses, Ways, num_steps_of, passes_of, passes_of_each, recompute_of

Times = list[list[float]]
Sizes = list[list[int]]


@dataclass(frozen=True, slots=True)
class Tables:
    """Times in microseconds and sizes in bytes, ``[stage][chunk]``.

    Attributes:
        passes: of each stage; equal stages share one. The rows from `forward_us` to `weight_bytes` are theirs (`StagePasses`).
            In the planners, counts of layers are counts of recompute steps.
        num_layers: of each stage.
        backward_us, weight_us, saved_by_split_us: no rows in a forward-only plan.
        message_us: of each chunk's message, ``[chunk]``.
        hops: the same ``[boundary][chunk]``, zero where both stages are on one rank.
        static: bytes of each rank that are planned as held throughout: its static bytes, the working memory of its largest
            pass, `message_room`, `shard_room` and `exchange_room`.
        message_bytes: of each chunk's message, ``[chunk]``.
        message_room: bytes of each rank set aside for messages in flight while the order is not known.
        shard_room: bytes of each rank set aside for chunks between the shards' `S` and `T`; part of `static`.
        exchange_room: bytes of each rank for the exchange of its largest chunk with experts; part of `static`.
        rank_of: the rank of each stage.
        stages_of: the stages of each rank.
        host_latency_us, host_us_per_byte: of a copy to the host or back; infinite where there is no link.
        host_links: of every rank, the link to the host that it copies over.
        offloadable_share: most of a chunk's kept bytes that may leave.
        added: of operations that other modules have added to the table of operations.
    """

    passes: tuple[StagePasses, ...]
    num_layers: tuple[int, ...]
    forward_us: Times
    backward_us: Times
    weight_us: Times
    saved_by_split_us: Times
    exchange_us: Times
    activation: Sizes
    layer_input: Sizes
    forward_alloc: Sizes
    forward_free: Sizes
    backward_residual: Sizes
    passing: Sizes
    weight_bytes: Sizes
    message_us: list[float]
    hops: Times
    static: tuple[int, ...]
    message_bytes: tuple[int, ...]
    message_room: tuple[int, ...]
    shard_room: tuple[int, ...]
    exchange_room: tuple[int, ...]
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    host_latency_us: float
    host_us_per_byte: float
    host_links: tuple[int, ...]
    offloadable_share: float
    added: dict[Op, OperationRows] = field(default_factory=dict)
    _columns: dict[Kinds, Columns] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ways: dict[StagePasses, Ways] = field(default_factory=dict, init=False, repr=False, compare=False)
    _derived: dict[Callable[[Tables], Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_passes(self, passes: Sequence[StagePasses]) -> Tables:
        """Return the tables with other passes of the stages."""
        return replace(self, passes=tuple(passes), **rows_of(passes, trains=bool(self.backward_us)))

    def ways(self, stage: int) -> Ways:
        """All ways to run the passes of a stage, tabulated on the first use."""
        passes = self.passes[stage]
        if passes not in self._ways:
            self._ways[passes] = passes.ways()
        return self._ways[passes]

    def once[T](self, function: Callable[[Tables], T]) -> T:
        """Return what a function computes from the tables, computed on the first use; it must not be changed."""
        if function not in self._derived:
            self._derived[function] = function(self)
        value: T = self._derived[function]
        return value

    @property
    def columns(self) -> Columns:
        """The tables as flat columns, for orders of forwards, backwards and weight gradients."""
        return self.columns_with(KINDS)

    def columns_with(self, kinds: Kinds) -> Columns:
        """The tables as flat columns for orders of some kinds of action, made on the first use."""
        if kinds not in self._columns:
            self._columns[kinds] = columns_of(self, kinds)
        return self._columns[kinds]

    @property
    def num_chunks(self) -> int:
        return len(self.message_us)

    def transfer_us(self, carries: MessageKind | Collective | None, boundary: int) -> Sequence[float]:
        """Time by chunk of a transfer, in microseconds. Messages of added operations count even where they stay on a rank,
        which depends on the order.

        Args:
            carries: the transfer; None for none.
        """
        if isinstance(carries, MessageKind) and carries.times:
            return self.hops[boundary]
        if isinstance(carries, MessageKind):
            return next(rows.message_us[carries.send] for rows in self.added.values() if carries.send in rows.message_us)
        times = (rows.collective_us[carries.op] for rows in self.added.values() if carries and carries.op in rows.collective_us)
        return next(times, [0.0] * self.num_chunks)

    @property
    def turn_us(self) -> list[float]:
        """Least time by chunk between the last stage's forward and its backward: the vocabulary shards' time, if any."""
        if Op.S not in self.added:
            return [0.0] * self.num_chunks
        shards, (loss_us,) = self.added[Op.S], self.added[Op.N].time_us
        slowest = map(max, *shards.time_us) if len(shards.time_us) > 1 else shards.time_us[0]
        moved = map(sum, zip(shards.collective_us[Op.SPREAD], shards.collective_us[Op.GATHER], strict=True))
        return [sum(parts) for parts in zip(slowest, moved, loss_us, strict=True)]

    def host_us(self, num_bytes: int) -> float:
        return self.host_latency_us + self.host_us_per_byte * num_bytes

    def recompute(self, stage: int, chunk: int, num_steps: int) -> Recompute:
        """Return the recomputed layers per mode after `num_steps` recompute steps."""
        if not num_steps:
            return NO_RECOMPUTE
        return recompute_of(self._modes(stage, chunk), self.num_layers[stage], num_steps)

    def num_steps(self, stage: int, chunk: int, recompute: Recompute) -> int:
        """Number of recompute steps that amounts to a given recompute.

        Args:
            recompute: layers per mode.
        """
        return num_steps_of(recompute, self._modes(stage, chunk))

    def _modes(self, stage: int, chunk: int) -> tuple[int, ...]:
        return tuple(int(step.mode[chunk]) for step in self.passes[stage].frontier)

    def recompute_us(self, stage: int, chunk: int, num_steps: int) -> float:
        """Microseconds that `num_steps` recompute steps add to the backward."""
        return float(self.ways(stage).again_us[chunk, num_steps])

    def kept_bytes(self, stage: int, chunk: int, num_steps: int) -> int:
        """Bytes of activations kept from forward to backward after `num_steps` recompute steps."""
        return int(self.ways(stage).kept_bytes[chunk, num_steps])

    @property
    def input_us(self) -> Times:
        """Backward times without the weight gradient."""
        return subtract_times(self.backward_us, self.saved_by_split_us)

    def busy_us(self, rank: int, backward_us: Times) -> float:
        """Time that a rank computes: the sum of the forwards and backwards of its stages, in microseconds.

        Args:
            backward_us: of each backward, ``[stage][chunk]``; no rows in a forward-only plan.
        """
        return sum(sum(times[stage]) for times in (self.forward_us, backward_us) if times for stage in self.stages_of[rank])


def subtract_times(whole_us: Times, parts_us: Times) -> Times:
    """Subtract times, entry by entry ``[stage][chunk]``. Stages whose rows are shared share the result's."""
    rows = list(zip(whole_us, parts_us, strict=True))
    differences = {(id(whole), id(parts)): (whole, parts) for whole, parts in rows}
    left_us = {key: [whole - part for whole, part in zip(*row, strict=True)] for key, row in differences.items()}
    return [left_us[id(whole), id(parts)] for whole, parts in rows]


def rows_of(passes: Sequence[StagePasses], trains: bool) -> dict[str, Any]:
    """Return the rows of `Tables` that passes have, by name. Stages of the same passes share rows: they must not be changed."""
    names = (name for name in StagePasses.__slots__ if name in Tables.__slots__ and name not in ("num_layers", "passes"))
    columns: dict[str, Any] = {}
    of_backward = ("backward_us", "weight_us", "saved_by_split_us")
    for name in names:
        rows = {own: getattr(own, name).tolist() for own in dict.fromkeys(passes)}
        columns[name] = [rows[own] for own in passes] if trains or name not in of_backward else []
    return columns


def columns_of(tables: Tables, kinds: Kinds) -> Columns:
    """Return the tables as flat columns."""
    chunks = tables.num_chunks
    added = [tables.added[op] for op in kinds[ADDED:]]
    num_items = chunks * max([len(tables.rank_of), *(len(rows.time_us) for rows in added)])
    need_starts, needs, need_us = need_columns(kinds, tables.rank_of, num_items, chunks, tables.transfer_us)
    distinct = {passes: tables.ways(stage) for stage, passes in enumerate(tables.passes)}
    starts = dict(zip(distinct, accumulate((ways.kept_bytes.size for ways in distinct.values()), initial=0), strict=False))
    first_way = [starts[passes] + distinct[passes].kept_bytes.shape[1] * np.arange(chunks) for passes in tables.passes]

    def sizes(rows: Sizes) -> IntegerList:
        return integers(stacked(rows, np.int64).ravel())

    def by_way(name: str) -> Numbers:
        return np.concatenate([getattr(ways, name).ravel() for ways in distinct.values()])

    dear_us = [np.max([step.layer_us for step in passes.frontier] or [np.zeros(chunks)], axis=0) for passes in tables.passes]
    times_us = [tables.forward_us, tables.backward_us, tables.weight_us, *(rows.time_us for rows in added)]
    return Columns(
        num_stages=len(tables.rank_of),
        num_chunks=chunks,
        num_items=num_items,
        rank_of=integers(tables.rank_of),
        static=integers(tables.static),
        num_layers=integers(np.repeat(tables.num_layers, chunks)),
        most=integers(np.concatenate([passes.most for passes in tables.passes])),
        first_way=integers(np.concatenate(first_way)),
        kept_bytes=integers(by_way("kept_bytes")),
        again_us=floats(by_way("again_us")),
        whole=integers(by_way("whole")),
        split=integers(by_way("split")),
        price=floats(by_way("price")),
        dear_us=floats(np.concatenate(dear_us)),
        forward_alloc=sizes(tables.forward_alloc),
        forward_free=sizes(tables.forward_free),
        residual=sizes(tables.backward_residual),
        weight_bytes=sizes(tables.weight_bytes),
        need_starts=need_starts,
        needs=needs,
        need_us=need_us,
        action_us=floats(by_node(times_us, num_items, np.float64)),
        saved_by_split_us=floats(stacked(tables.saved_by_split_us, np.float64).ravel()),
        added_takes=integers(by_node([rows.takes for rows in added], num_items, np.int64)),
        added_gives=integers(by_node([rows.gives for rows in added], num_items, np.int64)),
    )


MOST_OPEN_CHUNKS = 3
"""Chunks that a rank may have between the `S` and `T` of its vocabulary shard: one runs, one is being reduced, one waits."""


def tabulate(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    modes: Sequence[str] = FULL_ONLY,
    work: ChunkWork | None = None,
    of_stages: Mapping[int, StagePasses] | None = None,
) -> Tables:
    """Evaluate the costs of every stage and chunk. Stages with equal costs share passes and rows, which must not be changed.

    Args:
        work: of the chunks; None for the one that follows from the problem.
        of_stages: passes of the first of equal stages; None to compute them.
    """
    work, trains = work_of_table(chunks, problem) if work is None else work, not problem.forward_only
    equal_stages = costs.equal_stages_of(work)
    if of_stages is None:
        of_stages = {stage: passes_of(stage, work, costs, modes, forward_only=not trains) for stage in set(equal_stages)}
    passes = tuple(of_stages[stage] for stage in equal_stages)
    added = _added(problem, costs, work)
    message_us, message_bytes = costs.message_us(work).tolist(), costs.message_bytes(work).tolist()
    shards = shard_room(added, trains) or (0,) * problem.num_ranks
    room, exchanges = message_room(problem, message_bytes), (int(costs.exchange_bytes(work).max()),) * problem.num_ranks
    placement = problem.placement
    stages_of = tuple(tuple(s for s in range(problem.num_stages) if placement[s] == rank) for rank in range(max(placement) + 1))
    return Tables(
        passes=passes,
        num_layers=costs.num_layers,
        message_us=message_us,
        hops=[message_us if here != there else [0.0] * len(chunks) for here, there in pairwise(placement)],
        static=tuple(
            sum(static_items(own, work, costs).values(), sum(more))
            for own, *more in zip(stages_of, room, shards, exchanges, strict=True)
        ),
        message_bytes=tuple(message_bytes),
        message_room=room,
        shard_room=shards,
        exchange_room=exchanges,
        rank_of=placement,
        stages_of=stages_of,
        host_latency_us=costs.host_us(0),
        host_us_per_byte=_host_us_per_byte(costs),
        host_links=tuple(rank // costs.host_turns for rank in range(len(stages_of))),
        offloadable_share=costs.offloadable_share,
        added=added,
        **rows_of(passes, trains),
    )


def work_of_table(chunks: Sequence[Chunk], problem: Problem) -> ChunkWork:
    """Derive the work of a problem's chunks."""
    return work_of(chunks, problem.lengths, problem.token_multiple, problem.trained, problem.spans)


def tabulate_each(
    chunks: Sequence[tuple[Chunk, ...]], problems: Sequence[Problem], costs: Costs, modes: Sequence[str]
) -> list[Tables]:
    """Tabulate a table of every replica in lockstep: recompute modes come in one order in all.

    Args:
        modes: in this order; each must save more than the one before.
    """
    works = [*map(work_of_table, chunks, problems)]
    stages, joined = set(costs.equal_stages_of(works[0])), joined_work(works)
    each = {stage: passes_of_each(stage, works, joined, costs, modes, problems[0].forward_only) for stage in stages}
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


def shard_peaks(added: Mapping[Op, OperationRows], trains: bool) -> list[list[int]]:
    """Return the most bytes that each chunk takes on a rank in its `S`, or when any `T` runs behind it, ``[rank][chunk]``.

    Args:
        added: rows of the added operations, `S` and `T` among them.
    """
    shards, gradients = added[Op.S], added[Op.T]
    most = [max(takes, default=0) if trains else 0 for takes in gradients.takes]
    ranks = zip(shards.takes, shards.gives, most, strict=True)
    return [[max(take, take - give + more) for take, give in zip(takes, gives, strict=True)] for takes, gives, more in ranks]


def shard_room(added: Mapping[Op, OperationRows], trains: bool) -> tuple[int, ...]:
    """Bytes of each rank set aside for chunks between the shards' `S` and `T`: of `MOST_OPEN_CHUNKS` of the largest.

    Args:
        added: as `shard_peaks` takes them; without `S` there are no shards.
    """
    if Op.S not in added:
        return ()
    rows = added[Op.S]
    each = zip(shard_peaks(added, trains), rows.takes, rows.gives, strict=True)
    return tuple(
        max(peaks, default=0) + (min(MOST_OPEN_CHUNKS, len(peaks)) - 1) * max(map(sub, takes, gives), default=0)
        for peaks, takes, gives in each
    )


def static_items(stages: Sequence[int], work: ChunkWork, costs: Costs) -> dict[str, int]:
    """Compute the bytes by item that a rank holds throughout, with room for its largest pass; passes run one at a time."""
    items: Counter[str] = Counter()
    for stage in stages:
        items.update(costs.static_items(stage))
    passes = [{name: int(row.max(initial=0)) for name, row in costs.pass_items(stage, work).items()} for stage in stages]
    return dict(items) | max(passes, key=lambda sizes: sum(sizes.values()))


def _host_us_per_byte(costs: Costs) -> float:
    one_us = costs.host_us(1e9)
    return (costs.host_us(2e9) - one_us) / 1e9 if one_us < np.inf else np.inf
