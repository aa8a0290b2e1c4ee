"""Costs of one chunk table as plain rows ``[stage][chunk]``, computed once and read many times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_epp.plan import NO_RECOMPUTE, Op, Recompute
from megatron_epp.plan.operations import Collective, MessageKind, OperationRows
from megatron_epp.planner.frontier import num_steps_of, recompute_of
from megatron_epp.planner.kernels.codes import ADDED, KINDS, Kinds
from megatron_epp.planner.kernels.columns import Columns, by_node, frontier_sum, need_columns, stacked
from megatron_epp.planner.kernels.compiled import IntegerList, Numbers, floats, integers, plain

Times = list[list[float]]
Sizes = list[list[int]]

_frontier_sum = plain(frontier_sum)


@dataclass(frozen=True, slots=True)
class FrontierRows:
    """One step of the recompute frontier of every stage and chunk, ``[stage][chunk]``; see `frontier.FrontierStep`."""

    mode: Sizes
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
        spared_us: by which the backward is shorter if its weight gradient is split off.
        exchange_us: of the exchange between tensor-parallel ranks, a part of the forward, and as much of the backward.
        message_us: of each chunk's message, ``[chunk]``.
        hops: the same ``[boundary][chunk]``, zero where both stages are on one rank.
        activation: bytes kept from forward to backward without recompute.
        frontier: steps of the recompute frontiers, first to last. In the planners, counts of layers are counts of recompute
            steps.
        layer_input: bytes of the chunk that a layer that recomputes whole keeps.
        forward_alloc, forward_free: of the forward, without `activation`: caches of keys and values, and in a forward-only plan
            the bytes freed at its end.
        backward_head: bytes that a backward frees before it reaches the layers: the head's, and an attention half's.
        backward_release_per_layer: bytes that it frees with each layer that keeps everything, with keys and values and their
            gradient if it is the sequence's first slice, less their gradient if it is the last.
        backward_layer_peak: peak bytes at such a layer above those live when the backward reaches it.
        backward_constant: further bytes that a backward holds all along: for half layers, and buffers of KV offload.
        backward_half_peak: bytes that a backward needs only while it passes the attention half at the end of its stage, before
            it frees anything of a layer.
        first_mlp: bytes of the MLP at the start of a stage, where it counts as one layer with the attention at the stage's end
            and that layer keeps everything. A backward comes to that attention first, and frees the MLP last.
        backward_residual: bytes that a backward leaves behind, without the activations it frees: gradients of keys and values,
            opened or closed.
        passing: bytes held only while a pass of the chunk runs; `static` includes the largest pass.
        weight_bytes: bytes that the backward keeps for a split weight gradient.
        weight_layer: of these, one layer's.
        split_layer_peak: as `backward_layer_peak`, of a backward that keeps them.
        static: bytes of each rank that are planned as held throughout: its static bytes, the working memory of its largest
            pass, `message_room` and `shard_room`.
        message_bytes: of each chunk's message, ``[chunk]``.
        message_room: bytes of each rank set aside for messages in flight while the order is not known.
        shard_room: bytes of each rank set aside for chunks between the shards' `S` and `T`; part of `static`.
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
    spared_us: Times
    exchange_us: Times
    message_us: list[float]
    hops: Times
    activation: Sizes
    frontier: tuple[FrontierRows, ...]
    layer_input: Sizes
    forward_alloc: Sizes
    forward_free: Sizes
    backward_head: Sizes
    backward_release_per_layer: Sizes
    backward_layer_peak: Sizes
    backward_constant: Sizes
    backward_half_peak: Sizes
    first_mlp: Sizes
    backward_residual: Sizes
    passing: Sizes
    weight_bytes: Sizes
    weight_layer: Sizes
    split_layer_peak: Sizes
    static: tuple[int, ...]
    message_bytes: tuple[int, ...]
    message_room: tuple[int, ...]
    shard_room: tuple[int, ...]
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    host_latency_us: float
    host_us_per_byte: float
    host_links: tuple[int, ...]
    offloadable_share: float
    added: dict[Op, OperationRows] = field(default_factory=dict)
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

    def transfer_us(self, carries: MessageKind | Collective | None, boundary: int) -> Sequence[float]:
        """Time by chunk of a transfer, in microseconds. Messages of added operations count even where they stay on a rank,
        which depends on the order.

        Args:
            carries: the transfer; None for none.
            boundary: of a message, the lower of its two stages.
        """
        if isinstance(carries, MessageKind) and carries.times:
            return self.hops[boundary]
        if isinstance(carries, MessageKind):
            return next(rows.message_us[carries.send] for rows in self.added.values() if carries.send in rows.message_us)
        found = [rows.collective_us[carries.op] for rows in self.added.values() if carries and carries.op in rows.collective_us]
        return found[0] if found else [0.0] * len(self.message_us)

    @property
    def turn_us(self) -> list[float]:
        """Least time by chunk between the last stage's forward and its backward: the vocabulary shards' time, if any."""
        if Op.S not in self.added:
            return [0.0] * len(self.message_us)
        shards, (loss_us,) = self.added[Op.S], self.added[Op.N].time_us
        slowest = map(max, *shards.time_us) if len(shards.time_us) > 1 else shards.time_us[0]
        moved = map(sum, zip(shards.collective_us[Op.SPREAD], shards.collective_us[Op.GATHER], strict=True))
        return [sum(parts) for parts in zip(slowest, moved, loss_us, strict=True)]

    def host_us(self, num_bytes: int) -> float:
        return self.host_latency_us + self.host_us_per_byte * num_bytes

    @property
    def saved(self) -> Sizes:
        """Bytes that one layer saves by the first recompute step; the only one where whole layers are the only mode."""
        return self.frontier[0].saved

    @property
    def layer_us(self) -> Times:
        """Microseconds that the first recompute step of one layer adds; the only step where whole layers are the only mode."""
        return self.frontier[0].layer_us

    def at_ends(self, stage: int, chunk: int, split: bool) -> tuple[int, int]:
        """Compute the peak bytes of a backward at its first and its last layer, where whole layers are the only mode.

        See `kernels.memory.backward_peak`.

        Args:
            stage, chunk: the stage and chunk.
            split: the weight gradient is split off.

        Returns:
            the most above the live bytes when the backward starts, at the layer that it comes to first, where a layer that
            recomputes adds `saved`; and the most at the layer that it comes to last, of the chunk and what it makes, whatever
            was recomputed.
        """
        first = self.backward_constant[stage][chunk] - self.backward_head[stage][chunk]
        release_per_layer = self.backward_release_per_layer[stage][chunk]
        num_layers, layer_peak = self.num_layers[stage], self.backward_layer_peak[stage][chunk]
        if split:
            of_layer, layer_peak = self.weight_layer[stage][chunk], self.split_layer_peak[stage][chunk]
            first += self.weight_bytes[stage][chunk] - num_layers * of_layer
            release_per_layer -= of_layer
        first += max(layer_peak, self.backward_half_peak[stage][chunk]) + (
            self.first_mlp[stage][chunk] if num_layers > 1 else 0
        )
        return first, self.activation[stage][chunk] + first - max(0, num_layers - 1) * release_per_layer

    def recompute(self, stage: int, chunk: int, num_steps: int) -> Recompute:
        """Return the recomputed layers per mode after `num_steps` recompute steps.

        Args:
            stage, chunk: the stage and chunk.
            num_steps: number of recompute steps.
        """
        if not num_steps:
            return NO_RECOMPUTE
        modes = tuple(frontier_step.mode[stage][chunk] for frontier_step in self.frontier)
        return recompute_of(modes, self.num_layers[stage], num_steps)

    def num_steps(self, stage: int, chunk: int, recompute: Recompute) -> int:
        """Number of recompute steps that amounts to a given recompute.

        Args:
            stage, chunk: the stage and chunk.
            recompute: layers per mode.
        """
        return num_steps_of(recompute, [frontier_step.mode[stage][chunk] for frontier_step in self.frontier])

    def recompute_us(self, stage: int, chunk: int, num_steps: int) -> float:
        """Microseconds that `num_steps` recompute steps add to the backward.

        Args:
            stage, chunk: the stage and chunk.
            num_steps: number of recompute steps.
        """
        if not num_steps:
            return 0.0
        return _frontier_sum(
            [frontier_step.layer_us[stage][chunk] for frontier_step in self.frontier], 0, self.num_layers[stage], num_steps
        )

    def kept_bytes(self, stage: int, chunk: int, num_steps: int) -> int:
        """Bytes of activations kept from forward to backward after `num_steps` recompute steps.

        Args:
            stage, chunk: the stage and chunk.
            num_steps: number of recompute steps.
        """
        saved = [frontier_step.saved[stage][chunk] for frontier_step in self.frontier]
        return self.activation[stage][chunk] - _frontier_sum(saved, 0, self.num_layers[stage], num_steps)

    @property
    def input_us(self) -> Times:
        """Backward times without the weight gradient."""
        return less(self.backward_us, self.spared_us)

    def busy_us(self, rank: int, backward_us: Times) -> float:
        """Time that a rank computes: the sum of the forwards and backwards of its stages, in microseconds.

        Args:
            rank: the rank.
            backward_us: of each backward, ``[stage][chunk]``; no rows in a forward-only plan.
        """
        return sum(sum(times[stage]) for times in (self.forward_us, backward_us) if times for stage in self.stages_of[rank])


def less(whole_us: Times, parts_us: Times) -> Times:
    """Subtract times, entry by entry ``[stage][chunk]``."""
    rows = zip(whole_us, parts_us, strict=True)
    return [[whole - part for whole, part in zip(*row, strict=True)] for row in rows]


def columns_of(tables: Tables, kinds: Kinds) -> Columns:
    """Return the tables as flat columns.

    Args:
        tables: times and sizes.
        kinds: operations of the orders that are to be timed.
    """
    chunks = len(tables.message_us)
    added = [tables.added[op] for op in kinds[ADDED:]]
    num_items = chunks * max([len(tables.rank_of), *(len(rows.time_us) for rows in added)])
    need_starts, needs, need_us = need_columns(kinds, tables.rank_of, num_items, chunks, tables.transfer_us)

    def sizes(rows: Sizes) -> IntegerList:
        return integers(stacked(rows, np.int64).ravel())

    def by_frontier_step(tables: Iterable[Sequence[Sequence[float]]]) -> Numbers:
        return np.stack([stacked(table) for table in tables], axis=-1)  # [stage, chunk, step]

    layer_us = by_frontier_step(step.layer_us for step in tables.frontier)
    saved = by_frontier_step(step.saved for step in tables.frontier)
    heights = (by_frontier_step(step.mode for step in tables.frontier) >= 0).sum(axis=-1)
    num_layers = np.repeat(np.array(tables.num_layers)[:, None], chunks, axis=1)
    price = np.divide(layer_us, saved, out=np.full(saved.shape, np.inf), where=saved != 0)
    times_us = [tables.forward_us, tables.backward_us, tables.weight_us, *(rows.time_us for rows in added)]
    return Columns(
        num_stages=len(tables.rank_of),
        num_chunks=chunks,
        num_frontier_steps=len(tables.frontier),
        num_items=num_items,
        rank_of=integers(tables.rank_of),
        static=integers(tables.static),
        layer_us=floats(layer_us.ravel()),
        price=floats(price.ravel()),
        dear_us=floats(layer_us.max(axis=-1).ravel()),
        num_layers=integers(num_layers.ravel()),
        most=integers((num_layers * heights).ravel()),
        activation=sizes(tables.activation),
        saved=integers(saved.ravel()),
        fuller=integers(by_frontier_step(step.fuller for step in tables.frontier).ravel()),
        forward_alloc=sizes(tables.forward_alloc),
        forward_free=sizes(tables.forward_free),
        head=sizes(tables.backward_head),
        release_per_layer=sizes(tables.backward_release_per_layer),
        layer_peak=sizes(tables.backward_layer_peak),
        constant=sizes(tables.backward_constant),
        half_peak=sizes(tables.backward_half_peak),
        first_mlp=sizes(tables.first_mlp),
        residual=sizes(tables.backward_residual),
        weight_bytes=sizes(tables.weight_bytes),
        weight_layer=sizes(tables.weight_layer),
        split_layer_peak=sizes(tables.split_layer_peak),
        need_starts=need_starts,
        needs=needs,
        need_us=need_us,
        action_us=floats(by_node(times_us, num_items, np.float64)),
        spared_us=floats(stacked(tables.spared_us, np.float64).ravel()),
        added_takes=integers(by_node([rows.takes for rows in added], num_items, np.int64)),
        added_gives=integers(by_node([rows.gives for rows in added], num_items, np.int64)),
    )
