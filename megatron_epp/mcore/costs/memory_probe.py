"""Bytes that a chunk takes on a rank's own stage and the share that can be offloaded, by counting what autograd keeps of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from megatron_epp.cost import Line, ModeCosts, StageCosts
from megatron_epp.mcore.costs.probe import backward, forward, layers_of, run_weights, watched
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Recompute, Segment
from megatron_epp.plan.recompute import MODES
from megatron_epp.plan.sizing import MOST_ROUNDED_SLICES, size_class
from megatron_epp.runtime.attention.layout import SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import ChunkContext

_TOKENS = 256


def measure_bytes(stage: MegatronStage, costs: StageCosts) -> StageCosts:
    """Measure the bytes per token that a chunk takes on a stage, and return `costs` with them.

    These are the bytes kept by a layer in every recompute mode whose time is known (from the difference that one layer makes),
    by everything else, and by the head; the most a layer holds while its backward runs, and at the time its attention has
    computed the gradient of keys and values; and the bytes of keys and values and of their gradient.

    Where layers recompute, a stage keeps a little more (rotary angles, as an input of the part that runs again). This is always
    counted as the stage's own, so that a plan overestimates memory rather than underestimates it. Where weight gradients are
    split, the bytes that a backward keeps for them are measured too; they are zero for the stage's extras if the weights of
    these receive their gradients in the backward.
    """
    layers = stage.num_layers
    splits = stage.weights is not None
    if splits:
        deferred = _held(stage, NO_RECOMPUTE, keep_weights=True)
        costs = replace(
            costs,
            weight_bytes_per_token=deferred.layers_weights / max(1, layers),
            extra_weight_bytes_per_token=deferred.weights - deferred.layers_weights,
            extra_weight=costs.extra_weight if deferred.weights > deferred.layers_weights else Line(),
        )
    least = message_bytes(stage)
    costs = replace(costs, recomputed_layer_bytes_per_token=least)
    base = _held(stage, Recompute(full=layers))
    if layers == 0:
        return replace(costs, extra_bytes_per_token=base.kept, head_bytes_per_token=0.0)
    is_uniform = len({type(layer) for layer in layers_of(stage)}) == 1  # not so a hybrid model's attention and MLP layers

    def at(known: ModeCosts, mode: str) -> ModeCosts:
        """Measure what a layer keeps in a mode, by comparison with a stage that recomputes in full, and the most it holds."""
        found = _held(stage, _with(mode, 1, full=layers - 1) if is_uniform else _with(mode, layers))
        kept = least + (found.kept - base.kept) / (1 if is_uniform else layers)
        return replace(known, bytes_per_token=kept, full_bytes_per_token=kept + found.peak_above_entry if is_uniform else None)

    plain = at(ModeCosts(Line(), 0.0), "")
    costs = replace(
        costs,
        layer_bytes_per_token=plain.bytes_per_token,
        full_bytes_per_token=plain.full_bytes_per_token,
        recompute={name: at(known, name) for name, known in costs.recompute.items()},
        extra_bytes_per_token=max(0.0, base.kept - layers * least),
        head_bytes_per_token=base.head,
    )
    if splits and is_uniform:
        peak_above_entry = _held(stage, _with("", 1, full=layers - 1), keep_weights=True).peak_above_entry
        costs = replace(costs, apart_bytes_per_token=costs.layer_bytes_per_token + peak_above_entry)
    kv, gradient, left = _of_slices(stage)
    _, wider, _ = _of_slices(stage, num_slices=MOST_ROUNDED_SLICES + 1)
    costs = replace(
        costs,
        kv_bytes_per_token=kv,
        kv_gradient_bytes_per_token=gradient,
        many_kv_gradient_bytes_per_token=wider,
    )
    if is_uniform and gradient:
        costs = replace(costs, attended_bytes_per_token=least + left + kv)
    if splits and is_uniform and gradient:
        costs = replace(costs, apart_attended_bytes_per_token=least + _of_slices(stage, keep_weights=True)[2] + kv)
    return costs


def _with(mode: str, count: int, full: int = 0) -> Recompute:
    """Return a `Recompute` of `full` layers in full, then `count` layers in `mode`; empty means that they keep all."""
    return Recompute(full, **{mode: count} if mode else {})


class Held(NamedTuple):
    """Bytes per token.

    Attributes:
        kept: held from forward to backward.
        head: part of `kept` that is freed before the backward reaches the layers.
        peak_above_entry: peak while the last layer's backward runs, above what was live when it began.
        weights, layers_weights: kept by a backward for all weight gradients, and for the layers'.
    """

    kept: float
    head: float
    peak_above_entry: float
    weights: float
    layers_weights: float


def _held(stage: MegatronStage, recompute: Recompute, keep_weights: bool = False) -> Held:
    meter, chunk = SavedTensors(stage.parameters), bytes_chunk(stage)
    last = _LastLayer(meter)
    with meter, watched(layers_of(stage)[-1:], last.note):
        _, output, context = forward(stage, chunk, recompute=recompute)
        kept = meter.live_bytes
        backward(stage, output, context, keep_weights)
        weights = meter.live_bytes
        layers, _ = [meter.live_bytes for _ in run_weights(stage)] if keep_weights else (0, 0)
    sizes = kept, kept - last.begin_bytes, last.peak_bytes - last.begin_bytes, weights, layers
    return Held(*(size / chunk.num_tokens for size in sizes))


class _LastLayer:
    """Bytes of a meter while the backward of a stage's last layer runs, which is the first layer in the backward.

    Attributes:
        runs: True while that backward runs.
        begin_bytes: bytes live when the gradient of the layer's output has been computed.
        peak_bytes: peak from then until the gradient of the layer's input has been computed.
    """

    def __init__(self, meter: SavedTensors) -> None:
        self.runs = False
        self.begin_bytes = self.peak_bytes = 0
        self._meter = meter

    def note(self, event: str) -> None:
        """Follow the events of `watched`."""
        if event == "gradient in":
            self.runs = True
            self.begin_bytes = self._meter.peak_bytes = self._meter.live_bytes
        elif event == "gradient out":
            self.runs = False
            self.peak_bytes = self._meter.peak_bytes


def _of_slices(stage: MegatronStage, keep_weights: bool = False, num_slices: int = 2) -> tuple[float, float, float]:
    """Run two slices of a sequence and measure the second one's backward, which creates the gradient of keys and values.

    The sequence is declared to have `num_slices` slices. Returns bytes per token of a layer's keys and values; of their
    gradient; and the most that the last layer's backward holds when this gradient is created, above what was live when that
    backward began and not counting the gradient itself.
    """
    (segment,) = bytes_chunk(stage).segments
    tokens, relay, left_bytes = segment.end, stage.relay, [0]

    def cached() -> int:
        """Return the relay's bytes; note the live bytes if it has grown, while what attention kept is still held."""
        if last.runs and relay.num_bytes > cache_bytes:
            left_bytes.append(meter.live_bytes - last.begin_bytes)
        return relay.num_bytes

    cache_bytes = 0
    runs: list[tuple[Tensor, ChunkContext]] = []
    meter = SavedTensors(stage.parameters, cached)
    last = _LastLayer(meter)
    with meter, watched(layers_of(stage)[-1:], last.note):
        for start in (0, tokens):
            view = SliceView(0, start, start + tokens, 2 * tokens, 2 * tokens, num_slices)
            chunk = Chunk((Segment(0, start, start + tokens),))
            _, output, context = forward(stage, chunk, view, Recompute(full=stage.num_layers))
            runs.append((output, context))
        cache_bytes = relay.num_bytes
        backward(stage, *runs.pop(), keep_weights)
        gradient_bytes, most = relay.num_bytes - cache_bytes, max(left_bytes[1:], default=0)
        if keep_weights:
            stage.weight(0)
        backward(stage, *runs.pop())
    of_layer = stage.num_layers * 2 * tokens
    return cache_bytes / of_layer * 2 * tokens / size_class(2 * tokens), gradient_bytes / of_layer, most / tokens


def message_bytes(stage: MegatronStage) -> float:
    """Return the bytes per token of a message, which is the input of a layer."""
    shape, dtype, _ = stage.message(_TOKENS * stage.token_multiple)
    return math.prod(shape) * dtype.itemsize / (_TOKENS * stage.token_multiple)


def measure_offloadable_share(stage: MegatronStage) -> float:
    """Share of the bytes a chunk keeps whose storage nothing else holds (0 to 1): the smallest over all recompute modes."""
    shares = []
    for recompute in (NO_RECOMPUTE, *(Recompute(**{name: stage.num_layers}) for name in MODES)):
        with SavedTensors(stage.parameters) as saved:
            with saved.of((0, 0)):
                _, output, _ = forward(stage, bytes_chunk(stage), recompute=recompute)
            kept = saved.pop((0, 0))
            movable = sum(storage.num_bytes for storage in kept if storage.is_ours)
            shares.append(movable / max(1, sum(storage.num_bytes for storage in kept)))
            del output
    return min(shares)


def bytes_chunk(stage: MegatronStage) -> Chunk:
    return Chunk((Segment(0, 0, math.lcm(_TOKENS, stage.token_multiple)),))
