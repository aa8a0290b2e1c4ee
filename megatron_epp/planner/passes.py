"""Passes of a kind of stage: their times and bytes, and every way in which a backward can run.

The *recompute frontier* of a stage and chunk has the modes worth using, each saving more bytes at a higher price than the one
before. A recompute step takes one layer from one mode to the next. All layers of the stage take the first step before any takes
the second, so the number of steps says what all of them do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_epp.cost import memory as items
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import ChunkWork, IntColumn, TimeColumn
from megatron_epp.plan import NO_RECOMPUTE, Recompute
from megatron_epp.plan.recompute import MODES
from megatron_epp.planner.kernels.compiled import Numbers

ABSENT = -1
_NAMES = tuple(MODES)


class Frontier(NamedTuple):
    """Steps of the recompute frontiers of chunks, ``[step, chunk]``."""

    mode: Numbers  # position in `MODES` of the mode that a step leads to; `ABSENT` where the frontier is shorter
    # saved, layer_us: bytes that a layer saves by the step, of unlike layers their mean, and time that its backward adds
    saved: Numbers
    layer_us: Numbers
    fuller: Numbers  # growth of the layer's peak bytes while its backward runs; below zero where the peak shrinks


def no_frontier(num_chunks: int) -> Frontier:
    none = np.zeros((1, num_chunks), dtype=np.int64)
    return Frontier(none + ABSENT, none, np.zeros((1, num_chunks)), none)


def recompute_frontier(stage: int, work: ChunkWork, costs: Costs, modes: Sequence[str], in_order: bool = False) -> Frontier:
    """Compute the recompute frontier of every chunk on one stage: after each mode, the one of least price per byte saved.

    With one mode there is one step, whatever it costs. On a stage without layers no step saves anything. Of unlike layers each
    saves the mean, and modes come in the order of `MODES`, the last one first, so that a stage's first layers take every step
    before the others. With `in_order` modes come as given for all chunks, each of which must save more than the one before.
    """
    if not modes:
        return no_frontier(len(work.tokens))
    layers, counted = costs.num_layers[stage], len(costs.stages[stage].unlike) or 1
    plain = costs.activation_bytes(stage, work, NO_RECOMPUTE)
    plain_peak = costs.layer_peak_bytes(stage, work).num_bytes
    rows = []
    for name in modes:
        gives = (plain - costs.activation_bytes(stage, work, Recompute(**{name: counted}))) // counted
        saved = np.maximum(np.minimum(gives, plain // layers), 0) if layers else 0 * plain
        again_us = costs.recompute_us(stage, work, Recompute(**{name: 1}))
        rows.append((saved, again_us, costs.layer_peak_bytes(stage, work, name).num_bytes - plain_peak))
    all_saved, all_us, all_fuller = sizes = [np.array(each) for each in zip(*rows, strict=True)]
    mode_indices = np.array([_NAMES.index(name) for name in modes])
    if len(modes) == 1 or in_order:
        changes = (np.diff(each, axis=0, prepend=0 * each[:1]) for each in sizes)
        return Frontier(np.repeat(mode_indices[:, None], len(plain), axis=1), *changes)
    at_saved, at_us, at_fuller, at_mode = 0 * plain, np.zeros(len(plain)), 0 * plain, len(_NAMES) + 0 * plain
    chunks, steps = np.arange(len(plain)), []
    for _ in modes:
        more, longer_us = all_saved - at_saved, all_us - at_us
        usable = (more > 0) & ((mode_indices[:, None] < at_mode) | (counted == 1))
        price = np.where(usable, longer_us / np.maximum(more, 1), np.inf)
        chosen = price.argmin(axis=0)
        there = np.isfinite(price[chosen, chunks])
        if not there.any():
            break
        step, step_us, step_fuller = (
            np.where(there, each[chosen, chunks], 0) for each in (more, longer_us, all_fuller - at_fuller)
        )
        steps.append((np.where(there, mode_indices[chosen], ABSENT), step, step_us, step_fuller))
        at_saved, at_us, at_fuller = at_saved + step, at_us + step_us, at_fuller + step_fuller
        at_mode = np.where(there, mode_indices[chosen], at_mode)
    return Frontier(*map(np.array, zip(*steps, strict=True))) if steps else no_frontier(len(plain))


@functools.lru_cache(1 << 14)  # plans have few different ones
def recompute_of(modes: tuple[int, ...], num_layers: int, num_steps: int) -> Recompute:
    """Return the layers per mode, by its position in `MODES`, after a number of recompute steps."""
    counts = dict.fromkeys(MODES, 0)
    if num_steps and num_layers:
        complete, rest = divmod(num_steps, num_layers)
        if rest:
            counts[_NAMES[modes[complete]]] = rest
        if complete:
            counts[_NAMES[modes[complete - 1]]] += num_layers - rest
    return Recompute(**counts)


class BackwardBytes[Bytes](NamedTuple):
    """Bytes of a stage's backward, from which `moments` follow: in all as columns ``[chunk]``, or by item."""

    constant: Bytes  # held all along, besides the layers' peaks
    behind: Bytes  # in addition while it passes blocks behind the layers, before it frees anything
    # What it has freed (below zero) or added when it reaches its last layer: head, blocks behind the layers, inputs for their
    # split weight gradients
    reached: Bytes
    activations: Bytes  # by a layer from forward to backward
    peak: Bytes  # of a layer while its backward runs, `activations` included
    # Freed with a layer besides `activations`: keys and values and their gradient with a sequence's first slice, less the
    # gradient that its last slice opens, less the inputs of a split weight gradient
    gone: Bytes


class LayerGroup(NamedTuple):
    """Equal neighbouring layers with the same recompute; sizes as in `BackwardBytes`."""

    count: Any
    activations: Any
    peak: Any
    gone: Any


def moments(sizes: BackwardBytes[Numbers], groups: Sequence[LayerGroup]) -> Iterator[Numbers]:
    """Yield the bytes above those live when a backward starts, at every moment at which they can be most.

    A backward first frees the bytes that the head kept, then those of blocks behind the layers, which need more for a moment.
    At each layer memory rises for a while, by what recompute makes again, or by the gradient of its keys and values, which
    stays; then the bytes that the layer kept are freed, and with a sequence's first slice its keys and values and their
    gradient. Equal layers have their peak at the first or the last of them.

    Groups are in the order in which a backward comes to them, and their sizes, arrays that broadcast, take the place of those
    of a layer in `sizes`.
    """
    yield (start := sizes.constant + sizes.behind)
    live = sizes.constant + sizes.reached
    if not groups:
        yield live
    for count, activations, peak, gone in groups:
        rise, freed = peak - activations, activations + gone
        yield np.where(count > 0, live + rise, start)
        yield np.where(count > 1, live - (count - 1) * freed + rise, start)
        live = live - count * freed


def backward_items(
    stage: int, work: ChunkWork, costs: Costs, mode: str = "", layer: int | None = None, *, split: bool = False
) -> BackwardBytes[dict[str, IntColumn]]:
    """Compute the bytes of backwards by item (`cost.memory`).

    Activations and peak are of a layer in recompute `mode`, empty for one that keeps everything; of unlike layers of number
    `layer`, None for their mean. A `split` backward keeps inputs of weight gradients of the head and the layers that it has
    passed.
    """
    (opened, goes), comes = costs.opened_bytes(stage, work), costs.gradient_bytes(stage, work)
    (caches, cached), inner = costs.caches_of(stage, layer), costs.num_cached_inner(stage)
    of_cache, together, net = (caches * sizes // cached for sizes in (opened, opened + goes, opened + goes - comes))
    peak, activations = costs.layer_peak_bytes(stage, work, mode, layer), costs.layer_bytes(stage, work, mode, layer)
    own, held = items.RECOMPUTE_MODE_ITEMS.get(mode, items.LAYERS), activations if mode else 0 * activations
    sizes: BackwardBytes[dict[str, IntColumn]] = BackwardBytes(
        constant={items.CACHE_GRADIENT: costs.inner_gradient_bytes(stage, work)},
        behind={
            items.LAYERS: costs.behind_peak_bytes(stage, work),
            items.CACHE_GRADIENT: 0 * opened if split else -costs.gradients_not_yet_bytes(stage, work),
        },
        reached={
            items.HEAD: -costs.head_bytes(stage, work),
            items.LAYERS: -costs.behind_freed_bytes(stage, work),
            items.CACHE: -of_cache * inner,
            items.CACHE_GRADIENT: (of_cache - together) * inner,
        },
        activations={own: activations},
        peak={
            own: held,
            items.RECOMPUTED if mode else own: peak.num_bytes - peak.gradient - peak.prefix - held,
            items.CACHE_GRADIENT: peak.gradient,
            items.TRANSIENT_KV_GRADIENT: peak.prefix,
        },
        gone={items.CACHE: of_cache, items.CACHE_GRADIENT: net - of_cache},
    )
    if split:
        of_layer = costs.layer_weight_bytes(stage, work)
        more = costs.layer_peak_bytes(stage, work, mode, layer, split=True).num_bytes - peak.num_bytes
        sizes.reached[items.WEIGHT_INPUTS] = costs.weight_bytes(stage, work) - costs.num_layers[stage] * of_layer
        sizes.peak[items.WEIGHT_INPUTS], sizes.gone[items.WEIGHT_INPUTS] = more, -of_layer
    return sizes


def by_item(sizes: BackwardBytes[dict[str, IntColumn]]) -> BackwardBytes[Numbers]:
    """Stack the items ``[item, chunk]``, in the order of `cost.memory.DYNAMIC`."""
    none = 0 * next(iter(sizes.activations.values()))
    return BackwardBytes(*(np.array([column.get(name, none) for name in items.DYNAMIC]) for column in sizes))


class Ways(NamedTuple):
    """Every way to run the passes of a kind of stage, ``[chunk, number of recompute steps]``."""

    kept_bytes: Numbers
    again_us: Numbers  # time of recompute, a part of the backward
    # whole, split: most bytes of a backward and its chunk's activations together, with its weight gradient, and with that split
    # off. They never grow with recompute, except where layers that recompute hold more in their own backward.
    whole: Numbers
    split: Numbers
    price: Numbers  # time of the next step per byte that it saves; infinite where there is none


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePasses:
    """Times in microseconds and bytes of the passes of a kind of stage, as columns ``[chunk]``. Equal stages share one."""

    stage: int
    work: ChunkWork
    costs: Costs
    trains: bool  # there are backwards; without, all that is theirs is zero
    num_layers: int
    # forward_us, backward_us: of a pass without recompute
    forward_us: TimeColumn
    backward_us: TimeColumn
    weight_us: TimeColumn  # of the weight gradient, a part of the backward
    saved_by_split_us: TimeColumn  # by which the backward is shorter if its weight gradient is split off
    exchange_us: TimeColumn  # of the exchange between tensor-parallel ranks, a part of the forward, and as much of the backward
    activation: IntColumn  # bytes kept from forward to backward without recompute
    layer_input: IntColumn  # of these, what a layer that recomputes whole keeps
    handed: IntColumn  # of these, states that are handed on, which others than autograd hold
    # forward_alloc, forward_free: of the forward, without `activation`: caches of keys and values, and in a forward-only plan
    # the bytes freed at its end
    forward_alloc: IntColumn
    forward_free: IntColumn
    # Bytes that a backward leaves, without activations: gradients of keys and values, opened or closed
    backward_residual: IntColumn
    passing: IntColumn  # bytes held only while a pass runs, which static bytes include
    weight_bytes: IntColumn  # that a backward keeps for a split weight gradient
    streamed_bytes: IntColumn  # that a backward holds of keys and values that stream from and to the host
    frontier: Frontier

    @property
    def most(self) -> IntColumn:
        """Most recompute steps of every chunk."""
        return np.asarray(self.num_layers * (self.frontier.mode != ABSENT).sum(axis=0), dtype=np.int64)

    @property
    def savings(self) -> tuple[Numbers, Numbers]:
        """Bytes that all layers save together by each step of the frontier, and the most that one saves, ``[step, chunk]``."""
        if not self._is_unlike:
            return self.num_layers * self.frontier.saved, self.frontier.saved
        saved = -np.diff(self._unlike(split=False).activations, axis=0)
        return saved.sum(axis=1), saved.max(axis=1)

    @functools.cached_property
    def ways(self) -> Ways:
        """All layers take the first step of the frontier before any takes the second."""
        layers, most = self.num_layers, len(self.frontier.mode)
        _, saved, layer_us, fuller = (np.vstack([rows, np.zeros_like(rows[:1])]) for rows in self.frontier)
        full, rest = np.divmod(np.arange(layers * most + 1)[:, None], max(1, layers))
        full, following = full[:, 0], np.minimum(full[:, 0] + 1, most)
        less, more = (np.cumsum(rows, axis=0) - rows for rows in (saved, fuller))  # of a layer, after so many steps

        def most_bytes(sizes: BackwardBytes[Numbers], more: Numbers) -> Numbers:
            groups = [
                LayerGroup(count, sizes.activations - less[steps], sizes.peak + more[steps], sizes.gone)
                for count, steps in ((layers - rest, full), (rest, following))
            ]
            return np.asarray(np.maximum.reduce([*np.broadcast_arrays(*moments(sizes, groups if layers else ()))]))

        if not self._is_unlike:
            kept_bytes = self.activation - _taken(saved, layers, full, rest)
            whole_bytes, split_bytes = most_bytes(self.backward(), more), most_bytes(self.backward(split=True), 0 * more)
        else:
            whole, split = self._unlike(split=False), self._unlike(split=True)
            kept_bytes = self.activation - _saved_by_unlike(whole)
            whole_bytes = _most_of_unlike(self.backward(), whole)
            split_bytes = _most_of_unlike(self.backward(split=True), split)
        price = np.divide(layer_us, saved, out=np.full(saved.shape, np.inf), where=saved != 0)[full]
        return Ways(
            kept_bytes=kept_bytes.T,
            again_us=_taken(layer_us, layers, full, rest).T,
            whole=np.maximum(kept_bytes + whole_bytes, self.backward_residual).T,
            split=np.maximum(kept_bytes + split_bytes, self.backward_residual + self.weight_bytes).T,
            price=price.T,
        )

    def backward(self, *, split: bool = False) -> BackwardBytes[Numbers]:
        """Bytes of backwards, whose weight gradients are split off or not; zeros where there are none."""
        if not self.trains:
            return BackwardBytes(*[0 * self.activation] * len(BackwardBytes._fields))
        by_name = backward_items(self.stage, self.work, self.costs, split=split)
        sizes = BackwardBytes(*(np.asarray(sum(own.values())) for own in by_name))
        return sizes._replace(constant=sizes.constant + self.streamed_bytes)

    @property
    def _is_unlike(self) -> bool:
        return self.trains and bool(self.costs.stages[self.stage].unlike)

    def _unlike(self, *, split: bool) -> LayerGroup:
        """Sizes of unlike layers one by one after each step of the frontier, none of them first, ``[step, layer, chunk]``."""
        layers, none = self.costs.stages[self.stage].unlike, 0 * self.activation
        taken = np.vstack([none + ABSENT, self.frontier.mode])
        taken = np.where(taken == ABSENT, len(_NAMES), taken)
        taken = np.minimum.accumulate(taken, axis=0)  # modes come in the order of `MODES`, the last one first
        sizes = np.zeros((3, len(taken), len(layers), len(none)), dtype=np.int64)
        for kind in dict.fromkeys(layers):
            equal = [number for number, layer in enumerate(layers) if layer == kind]
            tails = (kind.kept_bytes(self.work) * (1.0 + self.costs.fragmentation_share)).astype(np.int64)
            for at in np.unique(taken).tolist():
                mode = _NAMES[at] if at < len(_NAMES) else ""
                bytes_of = backward_items(self.stage, self.work, self.costs, mode, equal[0], split=split)
                own = [sum(items.values()) for items in (bytes_of.activations, bytes_of.peak, bytes_of.gone)]
                own[0], own[2] = own[0] - tails * (bool(mode) and not MODES[mode].keeps_kv), own[2] + tails
                sizes[:, :, equal] = np.where((taken == at)[None, :, None], np.array(own)[:, None, None], sizes[:, :, equal])
        activations, peak, gone = sizes
        return LayerGroup(1, np.minimum.accumulate(activations, axis=0), peak, gone)


def _saved_by_unlike(layers: LayerGroup) -> Numbers:
    """Bytes that unlike layers save by a number of recompute steps, ``[steps, chunk]``."""
    gives = -np.diff(layers.activations, axis=0)
    none = np.zeros((1, gives.shape[2]), dtype=np.int64)
    return np.concatenate([none, np.cumsum(gives.reshape(-1, gives.shape[2]), axis=0)])


def _most_of_unlike(sizes: BackwardBytes[Numbers], layers: LayerGroup) -> Numbers:
    """Most bytes above those at a backward's start, ``[recompute steps, chunk]``, by `moments` with a group for each layer."""
    rise, freed = layers.peak - layers.activations, layers.activations + layers.gone
    before = np.cumsum(freed, axis=1) - freed  # by layers ahead of each
    all_freed, height = before[:, -1:] + freed[:, -1:], rise + before + freed
    live = sizes.constant + sizes.reached
    most = live - all_freed + np.flip(np.maximum.accumulate(np.flip(height, 1), axis=1), 1)  # from a layer to the last one
    ahead = np.maximum.accumulate(height, axis=1)[1:, :-1] - before[1:, 1:]  # of those before it, which have taken a step more
    most[:-1, 1:] = np.maximum(most[:-1, 1:], live - (all_freed - before)[:-1, 1:] + ahead)
    most = np.maximum(most, sizes.constant + sizes.behind)
    num_steps = (len(rise) - 1) * rise.shape[1]
    return np.asarray(most.reshape(-1, rise.shape[2])[: num_steps + 1])


def _taken(values: Numbers, layers: int, full: Numbers, rest: Numbers) -> Numbers:
    """Add up a column of the frontier's steps, ``[number of recompute steps, chunk]``.

    `values` are ``[step, chunk]`` and one more. All layers have taken `full` steps, and `rest` layers one more.
    """
    before = np.cumsum(layers * values, axis=0)[:-1]
    return np.asarray(np.vstack([0 * values[:1], before])[full] + rest * values[full])


def passes_of(
    stage: int, work: ChunkWork, costs: Costs, modes: Sequence[str], in_order: bool = False, forward_only: bool = False
) -> StagePasses:
    """Compute the passes of a stage.

    A sliced sequence's keys and values are allocated by the forward of its first slice, their gradient by the backward of its
    last; both are freed when the backward of the first slice ends. Without backward, the forward of the last slice frees
    the keys and values, and of everything else a forward holds only what it needs while it runs.
    """
    none, no_time = np.zeros(len(work.tokens), dtype=np.int64), np.zeros(len(work.tokens))
    opened, goes = costs.opened_bytes(stage, work)
    passes = StagePasses(
        stage=stage,
        work=work,
        costs=costs,
        trains=not forward_only,
        num_layers=costs.num_layers[stage],
        forward_us=costs.forward_us(stage, work),
        backward_us=no_time,
        weight_us=no_time,
        saved_by_split_us=no_time,
        exchange_us=costs.exchange_us(stage, work),
        activation=none,
        layer_input=costs.layer_bytes(stage, work, "full"),
        handed=costs.activation_items(stage, work).get(items.STATES, none),
        forward_alloc=opened,
        forward_free=none,
        backward_residual=none,
        passing=sum(costs.pass_items(stage, work).values(), none),
        weight_bytes=none,
        streamed_bytes=none,
        frontier=no_frontier(len(none)),
    )
    if forward_only:
        passing, closed = costs.transient_bytes(stage, work), costs.released_bytes(stage, work)
        return replace(passes, forward_alloc=opened + passing, forward_free=closed + passing)
    return replace(
        passes,
        backward_us=costs.backward_us(stage, work),
        weight_us=costs.weight_us(stage, work),
        saved_by_split_us=costs.saved_by_split_us(stage, work),
        activation=costs.activation_bytes(stage, work, NO_RECOMPUTE),
        backward_residual=costs.gradient_bytes(stage, work) - goes - opened,
        weight_bytes=costs.weight_bytes(stage, work),
        frontier=recompute_frontier(stage, work, costs, modes, in_order),
    )


def passes_of_each(
    stage: int, works: Sequence[ChunkWork], joined: ChunkWork, costs: Costs, modes: Sequence[str], forward_only: bool = False
) -> Iterator[StagePasses]:
    """Compute the passes of a stage in several tables at once, `joined`, with `in_order`: that takes little longer than one."""
    every, start = passes_of(stage, joined, costs, modes, True, forward_only), 0
    names = [field.name for field in fields(StagePasses) if isinstance(getattr(every, field.name), np.ndarray)]
    for work in works:
        own = slice(start, start := start + len(work.tokens))
        columns: dict[str, Any] = {name: getattr(every, name)[own] for name in names}
        yield replace(every, work=work, frontier=Frontier(*(rows[:, own] for rows in every.frontier)), **columns)
