"""Costs of one chunk table as plain rows ``[stage][chunk]``, computed once and read many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
from megatron_epp.cost.work import IntColumn, TimeColumn
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Op, Recompute
from megatron_epp.plan.operations import Collective, Message, Track, operations
from megatron_epp.planner.kernels import climb
from megatron_epp.planner.kernels.columns import ADDED, KINDS, Columns, Kinds, filled, need_columns
from megatron_epp.planner.kernels.compiled import Floats, Integers, floats, integers, plain
from megatron_epp.planner.memory.ladder import ABSENT, Rung, ladder, recompute_of, taken_by
from megatron_epp.planner.memory.messages import message_room
from megatron_epp.planner.problem import WHOLE, Problem

Times = list[list[float]]
Sizes = list[list[int]]

_climbed = plain(climb.climbed)


class Rows(NamedTuple):
    """Times and bytes of an added operation, ``[site][chunk]``, as its `Operation.rows` returns them.

    Attributes:
        time_us: of every action.
        takes, gives: bytes that it allocates when it starts and frees when it ends.
        collective_us: time by chunk of every collective that carries its results, or its needs.
    """

    time_us: Times
    takes: Sizes
    gives: Sizes
    collective_us: Mapping[Op, Sequence[float]]


@dataclass(frozen=True, slots=True)
class RungRows:
    """One step of the recompute frontier of every stage and chunk, ``[stage][chunk]``; see `ladder.Rung`."""

    level: Sizes
    saved: Sizes
    layer_us: Times
    fuller: Sizes


@dataclass(frozen=True, slots=True)
class Tables:
    """Times in microseconds and sizes in bytes, ``[stage][chunk]``.

    Attributes:
        num_layers: of each stage.
        forward_us, backward_us: of a pass without recompute.
        weight_us: of the weight gradient, a part of the backward.
        message_us: of each chunk's message, ``[chunk]``.
        hops: the same ``[boundary][chunk]``, zero where both stages are on one rank.
        activation: bytes kept from forward to backward without recompute.
        rungs: steps of the recompute frontiers, first to last. In the planners, counts of layers are counts of recompute steps.
        layer_input: bytes of the chunk that a layer that recomputes whole keeps.
        forward_alloc, forward_free: of the forward, without `activation`: caches of keys and values, and in a forward-only plan
            the bytes freed at its end.
        backward_head: bytes that a backward frees before it reaches the layers.
        backward_passed: bytes that it frees with each layer that keeps everything, with keys and values and their gradient if
            it is the sequence's first slice, less their gradient if it is the last.
        backward_surge: peak bytes at such a layer above those live when the backward reaches it.
        backward_throughout: further bytes that a backward holds all along: buffers of KV offload.
        backward_net: bytes that a backward leaves behind, without the activations it frees: gradients of keys and values,
            opened or closed.
        weight_bytes: bytes that the backward keeps for a split weight gradient.
        weight_layer: of these, one layer's.
        weight_surge: as `backward_surge`, of a backward that keeps them.
        static: bytes of each rank held throughout, and what the pass that takes most needs while it runs, as if it were; and
            `message_room`.
        message_bytes: of each chunk's message, ``[chunk]``.
        message_room: bytes of each rank set aside for messages in flight while the order is not known.
        rank_of: the rank of each stage.
        stages_of: the stages of each rank.
        host_latency_us, host_us_per_byte: of a copy to the host or back; infinite where there is no link.
        host_links: of every rank, the link to the host that it copies over.
        offloadable_share: most of a chunk's kept bytes that may leave.
        added: of operations that other modules have added to the table of operations.
    """

    num_layers: tuple[int, ...]
    forward_us: Times
    backward_us: Times
    weight_us: Times
    message_us: list[float]
    hops: Times
    activation: Sizes
    rungs: tuple[RungRows, ...]
    layer_input: Sizes
    forward_alloc: Sizes
    forward_free: Sizes
    backward_head: Sizes
    backward_passed: Sizes
    backward_surge: Sizes
    backward_throughout: Sizes
    backward_net: Sizes
    weight_bytes: Sizes
    weight_layer: Sizes
    weight_surge: Sizes
    static: tuple[int, ...]
    message_bytes: tuple[int, ...]
    message_room: tuple[int, ...]
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    host_latency_us: float
    host_us_per_byte: float
    host_links: tuple[int, ...]
    offloadable_share: float
    added: dict[Op, Rows] = field(default_factory=dict)
    _columns: dict[Kinds, Columns] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def columns(self) -> Columns:
        """The tables as flat columns, for orders of forwards, backwards and weight gradients."""
        return self.columns_with(KINDS)

    def columns_with(self, kinds: Kinds) -> Columns:
        """The tables as flat columns for orders of some kinds of action, made on the first use."""
        if kinds not in self._columns:
            self._columns[kinds] = columns_of(self, kinds)
        return self._columns[kinds]

    def transfer_us(self, carries: Message | Collective | None, boundary: int) -> Sequence[float]:
        """Time by chunk of a transfer, in microseconds.

        Args:
            carries: the transfer; None for none.
            boundary: of a message, the lower of its two stages.
        """
        if isinstance(carries, Message):
            return self.hops[boundary]
        found = [rows.collective_us[carries.op] for rows in self.added.values() if carries and carries.op in rows.collective_us]
        return found[0] if found else [0.0] * len(self.message_us)

    def host_us(self, num_bytes: int) -> float:
        return self.host_latency_us + self.host_us_per_byte * num_bytes

    @property
    def saved(self) -> Sizes:
        """Bytes that one layer saves by the first recompute step; the only one where whole layers are the only level."""
        return self.rungs[0].saved

    @property
    def layer_us(self) -> Times:
        """Microseconds that the first recompute step of one layer adds; the only step where whole layers are the only level."""
        return self.rungs[0].layer_us

    def at_ends(self, stage: int, chunk: int, apart: bool) -> tuple[int, int]:
        """Compute the peak bytes of a backward at its first and its last layer, where whole layers are the only level.

        See `kernels.memory.risen`.

        Args:
            stage, chunk: the stage and chunk.
            apart: the weight gradient is split off.

        Returns:
            the most above the live bytes when the backward starts, at the layer that it comes to first, where a layer that
            recomputes adds `saved`; and the most at the layer that it comes to last, of the chunk and what it makes, whatever
            was recomputed.
        """
        first, passed = -self.backward_head[stage][chunk], self.backward_passed[stage][chunk]
        layers, surge = self.num_layers[stage], self.backward_surge[stage][chunk]
        if apart:
            of_layer, surge = self.weight_layer[stage][chunk], self.weight_surge[stage][chunk]
            first += self.weight_bytes[stage][chunk] - layers * of_layer
            passed -= of_layer
        first += surge
        return first, self.activation[stage][chunk] + first - max(0, layers - 1) * passed

    def recompute(self, stage: int, chunk: int, taken: int) -> Recompute:
        """Return the recomputed layers per level after `taken` recompute steps.

        Args:
            stage, chunk: the stage and chunk.
            taken: number of recompute steps.
        """
        return recompute_of([rung.level[stage][chunk] for rung in self.rungs], self.num_layers[stage], taken)

    def taken(self, stage: int, chunk: int, recompute: Recompute) -> int:
        """Number of recompute steps that amounts to a given recompute.

        Args:
            stage, chunk: the stage and chunk.
            recompute: layers per level.
        """
        return taken_by(recompute, [rung.level[stage][chunk] for rung in self.rungs])

    def recompute_us(self, stage: int, chunk: int, taken: int) -> float:
        """Microseconds that `taken` recompute steps add to the backward.

        Args:
            stage, chunk: the stage and chunk.
            taken: number of recompute steps.
        """
        return _climbed([rung.layer_us[stage][chunk] for rung in self.rungs], 0, self.num_layers[stage], taken)

    def kept_bytes(self, stage: int, chunk: int, taken: int) -> int:
        """Bytes of activations kept from forward to backward after `taken` recompute steps.

        Args:
            stage, chunk: the stage and chunk.
            taken: number of recompute steps.
        """
        saved = [rung.saved[stage][chunk] for rung in self.rungs]
        return self.activation[stage][chunk] - _climbed(saved, 0, self.num_layers[stage], taken)

    @property
    def input_us(self) -> Times:
        """Backward times without the weight gradient."""
        rows = zip(self.backward_us, self.weight_us, strict=True)
        return [[whole - weight for whole, weight in zip(*row, strict=True)] for row in rows]


def tabulate(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    levels: Sequence[str] = WHOLE,
    in_order: bool = False,
    work: ChunkWork | None = None,
) -> Tables:
    """Evaluate the costs of every stage and chunk. Stages with equal costs share their rows, which must not be changed.

    A sliced sequence's keys and values are allocated by the forward of its first slice, their gradient by the backward of its
    last; both are freed when the backward of the first slice ends. Without backward, the forward of the last slice frees
    the keys and values, and of everything else a forward holds only what it needs while it runs.

    Args:
        chunks, problem, costs: the table, the batch and the costs to plan with.
        levels: of recompute, to choose from.
        in_order: see `ladder`.
        work: of the chunks; None for the one that follows from the problem.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple) if work is None else work
    stages, alike, trains = range(problem.num_stages), costs.alike, not problem.forward_only
    distinct = sorted(set(alike))
    found = {stage: {name: row.tolist() for name, row in _sizes(stage, work, problem, costs).items()} for stage in distinct}
    sizes: dict[str, Sizes] = {name: [found[stage][name] for stage in alike] for name in found[0]}

    def times(column: Callable[[int], TimeColumn]) -> Times:
        rows = {stage: column(stage).tolist() for stage in distinct}
        return [rows[stage] for stage in alike]

    message_us, message_bytes = costs.message_us(work).tolist(), costs.message_bytes(work).tolist()
    room = message_room(problem, message_bytes)
    placement = problem.placement
    stages_of = tuple(tuple(s for s in stages if placement[s] == rank) for rank in range(max(placement) + 1))
    return Tables(
        num_layers=costs.num_layers,
        forward_us=times(lambda stage: costs.forward_us(stage, work)),
        backward_us=times(lambda stage: costs.backward_us(stage, work)) if trains else [],
        weight_us=times(lambda stage: costs.weight_us(stage, work)) if trains else [],
        message_us=message_us,
        hops=[message_us if here != there else [0.0] * len(chunks) for here, there in pairwise(placement)],
        static=tuple(sum(static_items(own, work, costs).values(), more) for own, more in zip(stages_of, room, strict=True)),
        message_bytes=tuple(message_bytes),
        message_room=room,
        rank_of=placement,
        stages_of=stages_of,
        host_latency_us=costs.host_us(0),
        host_us_per_byte=_host_us_per_byte(costs),
        host_links=tuple(rank // costs.host_turns for rank in range(len(stages_of))),
        offloadable_share=costs.offloadable_share,
        added={
            kind.op: rows
            for kind in operations(Track.COMPUTE)
            if kind.rows is not None and (rows := kind.rows(costs, kind.sites(placement), work)) is not None
        },
        rungs=_rungs(
            {stage: ladder(stage, work, costs, levels, in_order) if trains else _no_ladder(len(chunks)) for stage in distinct},
            alike,
        ),
        **sizes,
    )


def static_items(stages: Sequence[int], work: ChunkWork, costs: Costs) -> dict[str, int]:
    """Compute the bytes by item that a rank holds throughout, with room for its largest pass; passes run one at a time.

    Args:
        stages: of the rank.
        work: of the chunks.
        costs: time and memory of every stage.
    """
    items: Counter[str] = Counter()
    for stage in stages:
        items.update(costs.static_items(stage))
    passes = [{name: int(row.max(initial=0)) for name, row in costs.pass_items(stage, work).items()} for stage in stages]
    return dict(items) | max(passes, key=lambda one: sum(one.values()))


def _rungs(found: dict[int, list[Rung]], alike: Sequence[int]) -> tuple[RungRows, ...]:
    """Combine the recompute frontiers of all stages, shorter ones padded with `ABSENT` steps."""
    longest = max(map(len, found.values()))
    rows = {}
    for stage, rungs in found.items():
        filled = [*rungs, *_no_ladder(len(rungs[0].level)) * (longest - len(rungs))]
        rows[stage] = [
            (rung.level.tolist(), rung.saved.tolist(), rung.layer_us.tolist(), rung.fuller.tolist()) for rung in filled
        ]
    return tuple(RungRows(*map(list, zip(*(rows[stage][at] for stage in alike), strict=True))) for at in range(longest))


def _no_ladder(num_chunks: int) -> list[Rung]:
    none = np.zeros(num_chunks, dtype=np.int64)
    return [Rung(none + ABSENT, none, np.zeros(num_chunks), none)]


def _host_us_per_byte(costs: Costs) -> float:
    one_us = costs.host_us(1e9)
    return (costs.host_us(2e9) - one_us) / 1e9 if one_us < np.inf else np.inf


def _sizes(stage: int, work: ChunkWork, problem: Problem, costs: Costs) -> dict[str, IntColumn]:
    none = np.zeros(len(work.tokens), dtype=np.int64)
    cache, gradient = costs.cache_bytes(stage, work), costs.gradient_bytes(stage, work)
    opened, closed = np.where(work.first, cache, 0), np.where(work.last, cache, 0)
    if problem.forward_only:
        passing = costs.transient_bytes(stage, work)
        kept = weight = of_layer = head = passed = surge = apart = net = none
        forward_alloc, forward_free = opened + passing, closed + passing
    else:
        kept = costs.activation_bytes(stage, work, NO_RECOMPUTE)
        comes = np.where(work.last, gradient, 0)
        layer, head = costs.layer_bytes(stage, work), costs.head_bytes(stage, work)
        goes = np.where(work.first, cache + gradient, 0)
        passed = layer + (goes - comes) // max(1, costs.num_layers[stage])
        surge, apart = (costs.layer_peak_bytes(stage, work, apart=split).num_bytes - layer for split in (False, True))
        weight, of_layer = costs.weight_bytes(stage, work), costs.layer_weight_bytes(stage, work)
        forward_alloc, forward_free = opened, none
        net = comes - goes
    return {
        "activation": kept,
        "layer_input": costs.layer_bytes(stage, work, "whole"),
        "forward_alloc": forward_alloc,
        "forward_free": forward_free,
        "backward_head": head,
        "backward_passed": passed,
        "backward_surge": surge,
        "backward_throughout": none,
        "backward_net": net,
        "weight_bytes": weight,
        "weight_layer": of_layer,
        "weight_surge": apart,
    }


def columns_of(tables: Tables, kinds: Kinds) -> Columns:
    """Return the tables as flat columns.

    Args:
        tables: times and sizes.
        kinds: operations of the orders that are to be timed.
    """
    chunks = len(tables.message_us)
    added = [tables.added[op] for op in kinds[ADDED:]]
    num_items = chunks * max([len(tables.rank_of), *(len(rows.time_us) for rows in added)])
    need_starts, needs, need_us = need_columns(
        kinds, tables.rank_of, num_items, chunks, lambda carries, site: tables.transfer_us(carries, site)
    )
    none: list[list[float]] = [[0.0] * chunks] * len(tables.rank_of)

    def column(rows: Sequence[Sequence[float]]) -> Floats:
        return floats(chain.from_iterable(rows or none))

    def sizes(rows: Sequence[Sequence[int]]) -> Integers:
        return integers(chain.from_iterable(rows))

    def by_rung[T](rows: Sequence[Sequence[Sequence[T]]]) -> list[T]:
        return [value for rung in zip(*map(chain.from_iterable, rows), strict=True) for value in rung]

    layer_us = by_rung([rung.layer_us for rung in tables.rungs])
    saved = by_rung([rung.saved for rung in tables.rungs])
    heights = [
        sum(level >= 0 for level in rungs) for rungs in zip(*(chain.from_iterable(r.level) for r in tables.rungs), strict=True)
    ]
    layers = [count for count in tables.num_layers for _ in range(chunks)]
    rungs = len(tables.rungs)
    return Columns(
        num_stages=len(tables.rank_of),
        num_chunks=chunks,
        num_rungs=rungs,
        num_items=num_items,
        rank_of=integers(tables.rank_of),
        static=integers(tables.static),
        forward_us=column(tables.forward_us),
        backward_us=column(tables.backward_us),
        layer_us=floats(layer_us),
        weight_us=column(tables.weight_us),
        hops=column([*tables.hops, [0.0] * chunks]),
        price=floats(time / size if size else float("inf") for time, size in zip(layer_us, saved, strict=True)),
        dear_us=floats(max(layer_us[at : at + rungs]) for at in range(0, len(layer_us), rungs)),
        layers=integers(layers),
        most=integers(count * height for count, height in zip(layers, heights, strict=True)),
        activation=sizes(tables.activation),
        saved=integers(saved),
        fuller=integers(by_rung([rung.fuller for rung in tables.rungs])),
        forward_alloc=sizes(tables.forward_alloc),
        forward_free=sizes(tables.forward_free),
        head=sizes(tables.backward_head),
        passed=sizes(tables.backward_passed),
        surge=sizes(tables.backward_surge),
        throughout=sizes(tables.backward_throughout),
        net=sizes(tables.backward_net),
        weight_bytes=sizes(tables.weight_bytes),
        weight_layer=sizes(tables.weight_layer),
        weight_surge=sizes(tables.weight_surge),
        need_starts=need_starts,
        needs=needs,
        need_us=need_us,
        added_us=floats(filled([rows.time_us for rows in added], num_items, 0.0)),
        added_takes=integers(filled([rows.takes for rows in added], num_items, 0)),
        added_gives=integers(filled([rows.gives for rows in added], num_items, 0)),
    )
