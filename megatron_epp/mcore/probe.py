"""Small measurements on a rank's own stage: what a chunk makes autograd keep, and how long it takes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost import Line, StageCosts, causal_pairs
from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.data.batch import ChunkArrays
from megatron_epp.mcore.stage import MegatronStage
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links import Links
from megatron_epp.runtime.meter import SavedTensorMeter
from megatron_epp.runtime.relay import SliceView
from megatron_epp.runtime.segments import SegmentTable
from megatron_epp.runtime.weights import Kept, WeightGradients
from megatron_epp.schedule import Chunk, Segment

_BYTES_TOKENS = 256
_REPEATS = 5
_LINK_TOKENS = (64, 1024)
_LINK_REPEATS = 12


def measure_bytes(stage: MegatronStage, costs: StageCosts) -> StageCosts:
    """Bytes per token that a chunk keeps: of a layer, from one layer more that recomputes; of all else; and of the head.

    Where layers recompute a stage keeps a little more (rotary angles, as an input of what runs again); that counts as the
    stage's own whether they do or not, so that a plan promises too much rather than too little. The head is known by what the
    first layer to recompute finds room in. Where weight gradients are apart: what a backward keeps for them, too.
    """
    layers = stage.num_layers
    kept, peak = _kept_and_peak(stage, layers)
    if stage.weights is not None:
        for_layers, for_all = _kept_for_weights(stage, stage.weights)
        costs = replace(
            costs, weight_bytes_per_token=for_layers / max(1, layers), extra_weight_bytes_per_token=for_all - for_layers
        )
    if layers == 0:
        return replace(costs, extra_bytes_per_token=kept, head_bytes_per_token=0.0)
    made = _kept_and_peak(stage, layers - 1)[0] - kept
    return replace(
        costs,
        layer_bytes_per_token=costs.recomputed_layer_bytes_per_token + made,
        extra_bytes_per_token=max(0.0, kept - layers * costs.recomputed_layer_bytes_per_token),
        head_bytes_per_token=max(0.0, made - (peak - kept)),
    )


def measure_times(stage: MegatronStage, costs: StageCosts) -> StageCosts:
    """Fit the stage's lines to whole, packed and sliced sequences; what is not the layers' own goes to the stage's extras."""
    runs: list[list[_Times]] = [[] for _ in _CASES]
    for _ in range(_REPEATS + 1):  # in turn, so that drift of the machine's speed hits all alike
        for case, seen in zip(_CASES, runs, strict=True):
            seen.append(_time_once(stage, case))
    times = [_Times(*map(statistics.median, zip(*seen[1:], strict=True))) for seen in runs]

    def fit(pick: Callable[[_Times], float], pairs: bool) -> Line:
        points = [Point(c.tokens, c.pairs, max(0.0, pick(t))) for c, t in zip(_CASES, times, strict=True)]
        return fit_line(points, pairs).line

    layers = max(1, stage.num_layers)
    if stage.weights is not None:
        costs = replace(
            costs,
            weight=fit(lambda t: t.layers_weight, False).scaled(1 / layers),
            extra_weight=fit(lambda t: t.weight - t.layers_weight, False),
        )
    return replace(
        costs,
        forward=fit(lambda t: t.layers_forward, True).scaled(1 / layers),
        backward=fit(lambda t: t.layers_backward, True).scaled(1 / layers),
        extra_forward=fit(lambda t: t.forward - t.layers_forward, False),
        extra_backward=fit(lambda t: t.backward - t.layers_backward, False),
    )


def measure_link(stage: MegatronStage, links: Links, rank: int) -> tuple[float, float]:
    """Latency and time per byte of a message between the first two ranks: half a round trip, the fastest of some.

    Every rank of the pipeline may call this; those after the second return zeros at once.
    """
    if rank > 1 or len(links.ranks) < 2:
        return 0.0, 0.0
    points = []
    for tokens in _LINK_TOKENS:
        shape, dtype, device = stage.message(tokens)
        payload, best_us = torch.zeros(shape, dtype=dtype, device=device), math.inf
        for _ in range(_LINK_REPEATS):
            start_us = _now_us()
            if rank == 0:
                links.send(payload, 1, gradient=False)
            links.post_receive(shape, dtype, device, peer=1 - rank, gradient=rank == 0).wait()
            if rank == 1:
                links.send(payload, 0, gradient=True)
            links.finish_sends()
            best_us = min(best_us, (_now_us() - start_us) / 2)
        points.append(Point(payload.nbytes, 0, best_us))
    line = fit_line(points, pairs=False).line
    return line.fixed_us, line.per_token_us


class _Case(NamedTuple):
    """One sequence, a slice behind a prefix, or several sequences of one length."""

    tokens: int
    segments: int = 1
    prefix: int = 0

    @property
    def pairs(self) -> int:
        return self.segments * causal_pairs(self.prefix, self.prefix + self.tokens // self.segments)

    def parts(self) -> list[tuple[Chunk, SliceView | None]]:
        """The chunks to run: the prefix, if there is one, and what is to be timed."""
        if self.prefix == 0:
            each = self.tokens // self.segments
            return [(Chunk(tuple(Segment(i, 0, each) for i in range(self.segments))), None)]
        length = self.prefix + self.tokens
        bounds = ((0, self.prefix), (self.prefix, length))
        return [(Chunk((Segment(0, a, b),)), SliceView(0, a, b, length, length)) for a, b in bounds]


class _Times(NamedTuple):
    """Microseconds of a pass of the whole stage, and of its layers alone. Weight gradients are a part of the backward; their
    own time is known only where they are apart.
    """

    forward: float
    backward: float
    layers_forward: float
    layers_backward: float
    weight: float
    layers_weight: float


_CASES = (
    *(_Case(tokens, segments) for tokens in (128, 512, 1024) for segments in (1, 8)),
    *(_Case(tokens, prefix=prefix) for tokens in (128, 512) for prefix in (512, 1536)),
)


def _arrays(tokens: int) -> ChunkArrays:
    ids = torch.zeros(tokens, dtype=torch.long)  # positions too: learned ones may be fewer than the probe's tokens
    return ChunkArrays(ids, ids.clone(), torch.ones(tokens), ids.clone())


def _forward(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute_layers: int = 0
) -> tuple[Tensor | None, Tensor, ChunkContext]:
    tokens = chunk.num_tokens
    stage.begin(lambda _: _arrays(tokens))
    shape, dtype, device = stage.message(tokens)
    hidden = None if stage.is_first else torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    context = ChunkContext(0, SegmentTable.build(chunk, tokens), stage.relay, view, recompute_layers)
    return hidden, stage.forward(context, hidden), context


def _backward(stage: MegatronStage, output: Tensor, context: ChunkContext, keep_weights: bool = False) -> None:
    stage.backward(context, output, None if stage.is_last else torch.ones_like(output), keep_weights)


def _kept_and_peak(stage: MegatronStage, recompute_layers: int) -> tuple[float, float]:
    """Bytes per token that autograd keeps between forward and backward, and the most it keeps in either."""
    meter = SavedTensorMeter(stage.model.parameters())
    ((chunk, view),) = _Case(_BYTES_TOKENS).parts()
    with meter:
        _, output, context = _forward(stage, chunk, view, recompute_layers)
        kept = meter.live_bytes
        _backward(stage, output, context)
    return kept / _BYTES_TOKENS, meter.peak_bytes / _BYTES_TOKENS


def _kept_for_weights(stage: MegatronStage, weights: WeightGradients) -> tuple[float, float]:
    """Bytes per token that a backward keeps for the weight gradients of the layers, and for all."""
    meter = SavedTensorMeter(stage.model.parameters())
    ((chunk, view),) = _Case(_BYTES_TOKENS).parts()
    with meter:
        _, output, context = _forward(stage, chunk, view)
        _backward(stage, output, context, keep_weights=True)
        everything = meter.live_bytes
        inside, outside = _by_place(stage, weights.pop(0))
        for kept in outside:
            kept.run()
        layers = meter.live_bytes
        for kept in inside:
            kept.run()
    return layers / _BYTES_TOKENS, everything / _BYTES_TOKENS


def _by_place(stage: MegatronStage, kept: list[Kept]) -> tuple[list[Kept], list[Kept]]:
    """Weight gradients of the layers, and the others."""
    inside = {id(weight) for weight in stage.decoder.layers.parameters()}
    return [one for one in kept if id(one.weight) in inside], [one for one in kept if id(one.weight) not in inside]


def _time_once(stage: MegatronStage, case: _Case) -> _Times:
    *before, timed = case.parts()
    earlier = [_forward(stage, *part) for part in before]
    clock: dict[str, float] = {}
    handles = _clock_layers(stage.decoder, lambda name: clock.__setitem__(name, _now_us()))
    try:
        clock["forward"] = _now_us()
        _, output, context = _forward(stage, *timed)
        clock["middle"] = _now_us()
        _backward(stage, output, context, keep_weights=stage.weights is not None)
        clock["end"] = _now_us()
    finally:
        for handle in handles:
            handle.remove()
    layers_weight, extra_weight = (0.0, 0.0) if stage.weights is None else _time_weights(stage, stage.weights.pop(0))
    for _, output, context in reversed(earlier):
        _backward(stage, output, context)
    total_backward = clock["end"] - clock["middle"]
    block_end = clock.get("block gradient out", clock["end"])
    block_start = clock.get("block gradient in", clock["middle"])
    return _Times(
        forward=clock["middle"] - clock["forward"],
        backward=total_backward + layers_weight + extra_weight,
        layers_forward=clock["block out"] - clock["block in"],
        layers_backward=block_end - block_start + layers_weight,
        weight=layers_weight + extra_weight,
        layers_weight=layers_weight,
    )


def _time_weights(stage: MegatronStage, kept: list[Kept]) -> tuple[float, float]:
    """Time of the weight gradients of the layers, and of the others."""
    times = []
    for part in _by_place(stage, kept):
        start_us = _now_us()
        for one in part:
            one.run()
        times.append(_now_us() - start_us)
    return times[0], times[1]


def _clock_layers(decoder: torch.nn.Module, note: Callable[[str], None]) -> list[torch.utils.hooks.RemovableHandle]:
    """Note when the block of layers is entered and left, forward and backward."""

    def entered(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        note("block in")
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        hidden = hidden if isinstance(hidden, Tensor) else getattr(decoder, "input_tensor", None)
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: note("block gradient out"))

    def left(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Tensor) -> None:
        note("block out")
        output.register_hook(lambda _: note("block gradient in"))

    return [
        decoder.register_forward_pre_hook(entered, with_kwargs=True),
        decoder.register_forward_hook(left, with_kwargs=True),
    ]


def _now_us() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() * 1e6
