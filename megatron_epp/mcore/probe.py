"""Small measurements on a rank's own stage: what a chunk makes autograd keep, and how long its messages take."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost import Line, StageCosts
from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.data.batch import ChunkArrays
from megatron_epp.mcore.stage import MegatronStage
from megatron_epp.runtime.boundary import Arrival
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links import Links
from megatron_epp.runtime.saved import SavedTensors
from megatron_epp.runtime.segments import SegmentTable
from megatron_epp.runtime.slice_view import SliceView
from megatron_epp.runtime.weights import Kept, PutOff, WeightGradients
from megatron_epp.schedule import NO_RECOMPUTE, Chunk, Recompute, Segment

_BYTES_TOKENS = 256
_VOCABULARY = 32
"""Tokens that every model has."""
_LINK_TOKENS = (64, 1024)
_LINK_REPEATS = 12


def measure_bytes(stage: MegatronStage, costs: StageCosts) -> StageCosts:
    """Bytes per token that a chunk keeps: of a layer, from one layer more that recomputes, at every level whose time is known;
    of all else; and of the head.

    Where layers recompute a stage keeps a little more (rotary angles, as an input of what runs again); that counts as the
    stage's own whether they do or not, so that a plan promises too much rather than too little. The head is known by what the
    first layer to recompute finds room in. Where weight gradients are apart: what a backward keeps for them, too; of which the
    stage's extras have none where their weight takes its gradient in the backward.
    """
    layers = stage.num_layers
    kept, peak = _kept_and_peak(stage, Recompute(whole=layers))
    if stage.weights is not None:
        for_layers, for_all = _kept_for_weights(stage, stage.weights)
        costs = replace(
            costs,
            weight_bytes_per_token=for_layers / max(1, layers),
            extra_weight_bytes_per_token=for_all - for_layers,
            extra_weight=costs.extra_weight if for_all > for_layers else Line(),
        )
    if layers == 0:
        return replace(costs, extra_bytes_per_token=kept, head_bytes_per_token=0.0)
    least = costs.recomputed_layer_bytes_per_token

    def more(level: str) -> float:
        """Bytes per token that a layer of a level keeps beside those of one that recomputes whole."""
        if len({type(layer) for layer in stage.decoder.layers}) > 1:  # a hybrid model's attention and MLP layers
            return (_kept_and_peak(stage, _with(level, layers))[0] - kept) / layers
        return _kept_and_peak(stage, _with(level, 1, whole=layers - 1))[0] - kept

    made = _kept_and_peak(stage, Recompute(whole=layers - 1))[0] - kept
    return replace(
        costs,
        layer_bytes_per_token=least + more(""),
        linear=None if costs.linear is None else replace(costs.linear, bytes_per_token=least + more("linear")),
        mlp=None if costs.mlp is None else replace(costs.mlp, bytes_per_token=least + more("mlp")),
        extra_bytes_per_token=max(0.0, kept - layers * least),
        head_bytes_per_token=max(0.0, made - (peak - kept)),
    )


def _with(level: str, count: int, whole: int = 0) -> Recompute:
    """So many layers of a level, behind those that recompute whole; no level for layers that keep everything."""
    return Recompute(whole)._replace(**{level: count} if level else {})


class Link(NamedTuple):
    """What messages take.

    Attributes:
        latency_us, us_per_byte: on their way.
        host_us: of the thread that computes, at either end. On a GPU, whose host runs ahead, this is nothing.
    """

    latency_us: float = 0.0
    us_per_byte: float = 0.0
    host_us: float = 0.0


def measure_link(stage: MegatronStage, links: Links, rank: int) -> Link:
    """Of a message between the first two ranks: half a round trip, the fastest of some.

    Every rank of the pipeline may call this; those after the second return zeros at once.
    """
    if rank > 1 or len(links.ranks) < 2:
        return Link()
    points, host_us = [], []
    for tokens in _LINK_TOKENS:
        shape, dtype, device = stage.message(tokens)
        payload, best_us = torch.zeros(shape, dtype=dtype, device=device), math.inf
        for _ in range(_LINK_REPEATS):
            start_us, start_cpu_s = _now_us(), time.thread_time()
            if rank == 0:
                links.send(payload, 1, gradient=False)
            receive = links.post_receive(shape, dtype, device, peer=1 - rank, gradient=rank == 0)
            own_s = time.thread_time() - start_cpu_s
            receive.wait()
            start_cpu_s = time.thread_time()
            if rank == 1:
                links.send(payload, 0, gradient=True)
            host_us.append((own_s + time.thread_time() - start_cpu_s) * 1e6 / 2)
            links.finish_sends()
            best_us = min(best_us, (_now_us() - start_us) / 2)
        points.append(Point(payload.nbytes, 0, best_us))
    line = fit_line(points, pairs=False).line
    return Link(line.fixed_us, line.per_token_us, 0.0 if torch.cuda.is_initialized() else statistics.median(host_us))


def _arrays(tokens: int) -> ChunkArrays:
    """Of many different tokens, so that a router spreads them; positions are all the first, for learned ones may be few."""
    ids = torch.arange(tokens) % _VOCABULARY
    return ChunkArrays(ids, ids.clone(), torch.ones(tokens), torch.zeros_like(ids))


def forward(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute: Recompute = NO_RECOMPUTE
) -> tuple[Tensor | None, Tensor, ChunkContext]:
    tokens = chunk.num_tokens
    stage.begin(lambda _: _arrays(tokens))
    shape, dtype, device = stage.message(tokens)
    hidden = None if stage.is_first else Arrival().enter(torch.randn(shape, dtype=dtype, device=device))
    context = ChunkContext(0, SegmentTable.build(chunk, tokens), stage.relay, view, recompute)
    return hidden, stage.forward(context, hidden), context


def backward(stage: MegatronStage, output: Tensor, context: ChunkContext, keep_weights: bool = False) -> None:
    stage.backward(context, output, None if stage.is_last else torch.ones_like(output), keep_weights)


def by_place(stage: MegatronStage, kept: list[Kept | PutOff]) -> tuple[list[Kept | PutOff], list[Kept | PutOff]]:
    """Weight gradients of the layers, and the others."""
    inside = {id(weight) for weight in stage.decoder.layers.parameters()}
    return [one for one in kept if id(one.weight) in inside], [one for one in kept if id(one.weight) not in inside]


def _kept_and_peak(stage: MegatronStage, recompute: Recompute) -> tuple[float, float]:
    """Bytes per token that autograd keeps between forward and backward, and the most it keeps in either."""
    meter = SavedTensors(stage.parameters)
    chunk = bytes_chunk(stage)
    tokens = chunk.num_tokens
    with meter:
        _, output, context = forward(stage, chunk, recompute=recompute)
        kept = meter.live_bytes
        backward(stage, output, context)
    return kept / tokens, meter.peak_bytes / tokens


def _kept_for_weights(stage: MegatronStage, weights: WeightGradients) -> tuple[float, float]:
    """Bytes per token that a backward keeps for the weight gradients of the layers, and for all."""
    meter = SavedTensors(stage.parameters)
    chunk = bytes_chunk(stage)
    with meter:
        _, output, context = forward(stage, chunk)
        backward(stage, output, context, keep_weights=True)
        everything = meter.live_bytes
        inside, outside = by_place(stage, weights.pop(0))
        for kept in outside:
            kept.run()
        layers = meter.live_bytes
        for kept in inside:
            kept.run()
    return layers / chunk.num_tokens, everything / chunk.num_tokens


def bytes_chunk(stage: MegatronStage) -> Chunk:
    return Chunk((Segment(0, 0, math.lcm(_BYTES_TOKENS, stage.token_multiple)),))


def _now_us() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() * 1e6
