"""Bytes that a chunk takes on a rank's own stage, by counting what autograd keeps of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost.blocks import HANDOVER, HEAD, INPUT, LAYER, PREDICTION, BlockCosts, StageCosts
from megatron_epp.cost.work import LinearTime, ModeCosts
from megatron_epp.mcore.costs.probe import backward, forward, layers_of, run_weights, watched
from megatron_epp.mcore.model.core_attention import relay_of
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Recompute, Segment
from megatron_epp.plan.recompute import FULL
from megatron_epp.plan.sizing import MOST_ROUNDED_SLICES, size_class
from megatron_epp.runtime.attention.segments import SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import ChunkContext

_TOKENS = 256
"""Tokens of the chunk whose bytes are counted, or a multiple for the ranks that share them. Few, since what autograd keeps is
proportional to tokens; other numbers were not compared.
"""


def measure_bytes(stage: MegatronStage, costs: StageCosts) -> StageCosts:
    """Measure the bytes per token that a chunk takes on a stage, and return `costs` with them.

    These are the bytes kept by a layer in every recompute mode whose time is known (from the difference that one layer makes),
    by everything else, and by the head; the most a layer holds while its backward runs, and when its attention has computed the
    gradient of keys and values; and the bytes of these and of their gradient.

    Where layers recompute, a stage keeps a little more (rotary angles), always counted as the stage's own, so that a plan
    rather overestimates memory. Where weight gradients are split, the bytes that a backward keeps for them are measured too;
    they are zero for the stage's extras if the weights of these receive their gradients in the backward.
    """
    layers = stage.num_layers
    # What layers of multi-token prediction keep for weights counts with the head, and without other layers all with the input.
    costs = costs.changed(PREDICTION, bytes_per_token=0.0, weight_bytes_per_token=0.0, attended_bytes_per_token=None)
    splits = stage.weights is not None
    if splits:
        deferred = _held(stage, NO_RECOMPUTE, keep_weights=True)
        costs = costs.changed(LAYER, weight_bytes_per_token=deferred.layers_weights / max(1, layers))
        costs = costs.changed(INPUT, weight_bytes_per_token=0.0)
        costs = costs.changed(HEAD, weight_bytes_per_token=deferred.weights - deferred.layers_weights)
        if deferred.weights <= deferred.layers_weights:
            costs = costs.changed(INPUT, HEAD, weight=LinearTime())
    least = message_bytes(stage)
    costs = costs.changed(LAYER, input_bytes_per_token=least)
    base = _held(stage, Recompute(full=layers))
    if layers == 0:
        costs = costs.changed(INPUT, bytes_per_token=base.activations).changed(HEAD, bytes_per_token=0.0)
        caches = any(block.kv is not None for block in costs.inner)
        return _with_kv_bytes(costs, stage, _of_slices(stage)) if caches else costs
    # Not so a hybrid model's layers of attention, an MLP or experts, nor where only some layers have experts, or a window.
    parts = "self_attention", "mlp"  # Mamba-2 layers have neither
    kinds = {(type(at), *(type(getattr(at, part, None)) for part in parts), _num_cached(at)) for at in layers_of(stage)}
    is_alike = len(kinds) == 1

    def at(known: ModeCosts, mode: str) -> ModeCosts:
        held = _held(stage, _with(mode, 1, full=layers - 1))
        per_token = least + held.activations - base.activations
        return replace(known, bytes_per_token=per_token, full_bytes_per_token=max(0.0, per_token + held.peak_above_entry))

    known = {"": ModeCosts(LinearTime(), 0.0)} | costs.layers.recompute
    unlike = () if is_alike else _unlike_layers(stage, costs.layers, least)
    modes = {name: at(mode, name) for name, mode in known.items()} if is_alike else _mean(unlike, known)
    plain = modes.pop("")
    of_head = max(0.0, base.head - base.ahead)
    costs = costs.changed(PREDICTION, bytes_per_token=base.ahead)
    costs = costs.changed(INPUT, bytes_per_token=max(0.0, base.activations - layers * least) - of_head - base.ahead)
    costs = costs.changed(HEAD, bytes_per_token=of_head).changed(
        LAYER,
        bytes_per_token=plain.bytes_per_token,
        full_bytes_per_token=plain.full_bytes_per_token,
        recompute=modes,
    )
    costs = replace(costs, unlike=unlike)
    if splits and is_alike:
        above = _held(stage, Recompute(full=layers - 1), keep_weights=True).peak_above_entry
        costs = costs.changed(LAYER, apart_bytes_per_token=plain.bytes_per_token + above)
    slices = _of_slices(stage)
    costs = _with_kv_bytes(costs, stage, slices)
    if slices.ahead is not None:
        costs = costs.changed(PREDICTION, attended_bytes_per_token=base.ahead / stage.depths + of_head - slices.ahead)
    if slices.gradient:
        held = least + slices.cache
        costs = costs.changed(LAYER, attended_bytes_per_token=held + slices.left)
        if splits and is_alike:
            costs = costs.changed(LAYER, apart_attended_bytes_per_token=held + _of_slices(stage, keep_weights=True).left)
    return costs


def _unlike_layers(stage: MegatronStage, mean: BlockCosts, least: float) -> tuple[BlockCosts, ...]:
    """Measure what each of a stage's layers keeps, and the most that its backward holds, where they are of several kinds.

    `mean` has the costs whose recompute modes are measured; `least` is the bytes per token of a layer's input, which counts for
    a layer that recomputes in full.
    """
    own = {mode: _held(stage, _with(mode, stage.num_layers)).layers for mode in ("", *mean.recompute, FULL)}
    unlike = []
    for number, (bare, *_) in enumerate(own[FULL]):
        # Behind the last one nothing takes the place of what its forward drops at its end, such as a norm's output
        at = 2 if number + 1 == stage.num_layers else 0
        kept_bytes = {mode: least + layers[number][at] - bare for mode, layers in own.items()}
        most = {mode: kept_bytes[mode] + layers[number][1] for mode, layers in own.items()}
        modes = {mode: ModeCosts(known.again, kept_bytes[mode], most[mode]) for mode, known in mean.recompute.items()}
        unlike.append(
            replace(
                mean,
                count=1,
                bytes_per_token=kept_bytes[""],
                full_bytes_per_token=max(most[""], most[FULL]),
                attended_bytes_per_token=None,
                input_bytes_per_token=least,
                recompute=modes,
            )
        )
    return tuple(unlike)


def _mean(layers: Sequence[BlockCosts], known: Mapping[str, ModeCosts]) -> dict[str, ModeCosts]:
    return {
        mode: replace(
            cost,
            bytes_per_token=sum((layer.mode(mode) or layer).bytes_per_token for layer in layers) / len(layers),
            full_bytes_per_token=max((layer.mode(mode) or layer).full_bytes_per_token or 0.0 for layer in layers),
        )
        for mode, cost in known.items()
    }


def _with_kv_bytes(costs: StageCosts, stage: MegatronStage, few: _Slices) -> StageCosts:
    """Return `costs` with the bytes of keys and values, of a sequence of `few` slices and of many."""
    # Only gradients of less than 32 bits are added up in a wider type where slices are many.
    is_wide = all(parameter.dtype == torch.float32 for parameter in stage.parameters)
    many = few if is_wide else _of_slices(stage, num_slices=MOST_ROUNDED_SLICES + 1)
    kv = replace(
        costs.kv,
        bytes_per_token=few.cache,
        gradient_bytes_per_token=few.gradient,
        many_gradient_bytes_per_token=many.gradient,
    )
    costs = costs.changed(LAYER, PREDICTION, kv=kv)
    caches = _caches(stage)
    for kind, own in caches.items():
        costs = costs.changed(kind, cached_share=sum(own) / max(1, len(own)))
    of_layers = zip(costs.unlike, caches[LAYER], strict=bool(costs.unlike))
    unlike = tuple(replace(at, cached_share=float(has)) for at, has in of_layers)
    if not unlike:
        of_input = sum(block.bytes_per_token for block in costs.blocks if block.kind == INPUT)
        costs = costs.changed(INPUT, bytes_per_token=of_input + few.cache * _most_taken_off(caches[LAYER]))
    costs = replace(costs, unlike=unlike)
    received, *rest = (block for block in costs.blocks if block.kind != HANDOVER)  # that of formulas is of the mean layer
    if not few.hands_over:
        return replace(costs, blocks=(received, *rest))
    handover, tails = resolve_name("megatron_epp.mcore.costs.handover_probe:handed_over")(stage)
    costs = replace(costs, blocks=(received, handover, *rest)).changed(LAYER, tail_bytes=sum(tails) / max(1, len(tails)))
    with_tails = zip(costs.unlike, tails, strict=bool(costs.unlike))
    return replace(costs, unlike=tuple(replace(at, tail_bytes=own) for at, own in with_tails))


def _caches(stage: MegatronStage) -> dict[str, list[bool]]:
    """Return which layers cache keys and values, by kind of block: those with a window or a state hand on what they have."""
    return {
        LAYER: [_num_cached(layer) > 0 for layer in layers_of(stage)],
        PREDICTION: [_num_cached(stage.language_model) > _num_cached(stage.decoder)] * stage.depths,
    }


def _num_cached(module: torch.nn.Module) -> int:
    return sum((relay := relay_of(part)) is not None and relay.window is None for part in module.modules())


def _most_taken_off(caches: Sequence[bool]) -> float:
    """Return by how many layers' keys and values a stage would be counted too low that takes the mean of its layers for each.

    Bytes in caches are taken off layers that keep everything, the last ones of a stage, which may have less than the mean.
    """
    mean = sum(caches) / max(1, len(caches))
    return max((mean * (len(caches) - at) - sum(caches[at:]) for at in range(len(caches))), default=0.0)


def _with(mode: str, count: int, full: int = 0) -> Recompute:
    """Return a `Recompute` of `full` layers in full, then `count` layers in `mode`; empty means that they keep all."""
    return Recompute(full, **{mode: count} if mode else {})


class Held(NamedTuple):
    """Bytes per token."""

    # What each layer keeps, its backward's peak above what is live when that begins, and its forward's peak
    layers: Sequence[tuple[float, float, float]]
    activations: float  # held from forward to backward
    head: float  # part of `activations` that is freed before the backward reaches the layers
    peak_above_entry: float  # peak while the backward of the last layer runs, above what was live when it began
    # weights, layers_weights: kept by a backward for all weight gradients, and for the layers'
    weights: float
    layers_weights: float
    ahead: float  # part of `activations` that layers of multi-token prediction keep


def _held(stage: MegatronStage, recompute: Recompute, keep_weights: bool = False) -> Held:
    """Run a chunk of two sequences, whose numbers some kernels keep, and measure; watch all layers for their peaks."""
    meter, tokens = SavedTensors(stage.parameters), bytes_chunk(stage).num_tokens
    chunk = Chunk((Segment(0, 0, tokens // 2), Segment(1, 0, tokens - tokens // 2)))
    layers, ahead = [LayerBytes(meter) for _ in layers_of(stage)], LayerBytes(meter)
    of_prediction = stage.language_model.mtp.layers if stage.depths else ()

    def note(number: int, event: str) -> None:
        if event == "gradient in":  # the layer behind may not have been told yet that its backward has ended
            for layer in layers[number + 1 :]:
                layer.note_peak()
        layers[number].note(event)

    with meter, watched(of_prediction, ahead.note), ExitStack() as watching:
        for number, module in enumerate(layers_of(stage)):
            watching.enter_context(watched([module], partial(note, number)))
        _, output, context = forward(stage, chunk, recompute=recompute)
        activations = meter.live_bytes
        backward(stage, output, context, keep_weights)
        weights = meter.live_bytes
        layers_weights, _ = [meter.live_bytes for _ in run_weights(stage)] if keep_weights else (0, 0)
    last = layers[-1] if layers else LayerBytes(meter)
    sizes = activations, activations - last.begin_bytes, last.above_bytes, weights, layers_weights, ahead.kept_bytes
    rows = [(each.kept_bytes / tokens, each.above_bytes / tokens, each.most_bytes / tokens) for each in layers]
    return Held(rows, *(size / tokens for size in sizes))


class LayerBytes:
    """Bytes that a layer keeps, and that are held while its backward runs.

    Attributes:
        kept_bytes, most_bytes: more live behind its forward than ahead of it, of several in all, and at most in the last.
        runs: number of its modules whose backward runs.
        begin_bytes: bytes live when the gradient of the layer's output has been computed.
        peak_bytes: peak from then until the gradient of the layer's input has been computed.
    """

    def __init__(self, meter: SavedTensors) -> None:
        self.runs = 0
        self.kept_bytes = self.most_bytes = self.begin_bytes = self.peak_bytes = 0
        self._meter = meter

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.begin_bytes

    def note(self, event: str) -> None:
        if event in ("in", "out"):
            self.most_bytes = self._meter.peak_bytes - self.kept_bytes
            self.kept_bytes = self._meter.live_bytes - self.kept_bytes
            self._meter.peak_bytes = self._meter.live_bytes
        elif event == "gradient in":
            if not self.runs:
                self.begin_bytes = self._meter.peak_bytes = self._meter.live_bytes
            self.runs += 1
        elif event == "gradient out":
            self.note_peak()
            self.runs -= 1

    def note_peak(self) -> None:
        if self.runs:
            self.peak_bytes = max(self.peak_bytes, self._meter.peak_bytes)


class _Slices(NamedTuple):
    """Bytes per token."""

    # cache, gradient: of a layer's keys and values, and of their gradient
    cache: float
    gradient: float
    # The most that the last layer's backward holds when this gradient is created, above what was live when that backward began
    # and not counting the gradient itself
    left: float
    hands_over: bool  # the first slice hands over more than keys and values
    # That a backward has freed when it has made the first gradient of keys and values of multi-token prediction; None if it
    # makes none
    ahead: float | None


def _of_slices(stage: MegatronStage, keep_weights: bool = False, num_slices: int = 2) -> _Slices:
    """Run two slices of a sequence of `num_slices`, and measure the second's backward, which makes keys' and values' gradient.

    `keep_weights` splits weight gradients off. The backward of the last layer that caches is watched.
    """
    tokens, kv_cache, left_bytes, freed_bytes = bytes_chunk(stage).num_tokens, stage.kv_cache, [0], list[int]()

    def cached() -> int:
        """Return the caches' bytes; note the live bytes if they have grown, while what attention kept is still held."""
        if last.runs and kv_cache.cache_bytes > begin_bytes:
            left_bytes.append(meter.live_bytes - last.begin_bytes)
        elif not (last.begin_bytes or freed_bytes) and kv_cache.cache_bytes > cache_bytes > 0:
            freed_bytes.append(live_bytes - meter.live_bytes)
        return kv_cache.cache_bytes

    cache_bytes, begin_bytes, live_bytes, hands_over = 0, 0, 0, False

    def note(event: str) -> None:
        nonlocal begin_bytes
        last.note(event)
        if event == "gradient in":
            begin_bytes = kv_cache.cache_bytes  # a half after it has made its gradient before

    runs: list[tuple[Tensor, ChunkContext]] = []
    meter = SavedTensors(stage.parameters, cached)
    last = LayerBytes(meter)
    caching = [layer for layer in layers_of(stage) if _num_cached(layer)] or [*layers_of(stage)]
    with meter, watched(caching[-1:], note):
        for start in (0, tokens):
            view = SliceView(0, start, start + tokens, 2 * tokens, 2 * tokens, num_slices)
            chunk = Chunk((Segment(0, start, start + tokens),))
            _, output, context = forward(stage, chunk, view, Recompute(full=stage.num_layers))
            runs.append((output, context))
            hands_over = hands_over or kv_cache.num_bytes > kv_cache.cache_bytes  # the last slice takes it
        cache_bytes, live_bytes = kv_cache.cache_bytes, meter.live_bytes
        backward(stage, *runs.pop(), keep_weights)
        gradient_bytes, most = kv_cache.cache_bytes - cache_bytes, max(left_bytes[1:], default=0)
        if keep_weights:
            stage.weights.run(0)
        backward(stage, *runs.pop())
    of_layer = max(1, sum(map(sum, _caches(stage).values()))) * 2 * tokens
    cache = cache_bytes / of_layer * 2 * tokens / size_class(2 * tokens)
    ahead = freed_bytes[0] / tokens if stage.depths and freed_bytes else None
    return _Slices(cache, gradient_bytes / of_layer, most / tokens, hands_over, ahead)


def message_bytes(stage: MegatronStage) -> float:
    """Return the bytes per token of a message, which is the input of a layer."""
    shape, dtype, _ = stage.message(_TOKENS * stage.token_multiple)
    return math.prod(shape) * dtype.itemsize / (_TOKENS * stage.token_multiple)


def run_other_size(stage: MegatronStage) -> None:
    """Run a stage with another number of tokens than `measure_bytes`, in each way that training runs it.

    Compiled functions of layers are compiled for the first number they see, and once more for any other; without gradients, as
    in evaluation and in the first forward of layers that recompute, they are other functions.
    """
    chunk = Chunk((Segment(0, 0, bytes_chunk(stage).num_tokens + stage.token_multiple),))
    for recompute in (NO_RECOMPUTE, Recompute(full=stage.num_layers)) if stage.has_gradient else ():
        _, output, context = forward(stage, chunk, recompute=recompute)
        backward(stage, output, context)
        del output, context
    for size in (bytes_chunk(stage), chunk):
        with torch.no_grad():
            forward(stage, size)


def bytes_chunk(stage: MegatronStage) -> Chunk:
    return Chunk((Segment(0, 0, math.lcm(_TOKENS, stage.token_multiple)),))
