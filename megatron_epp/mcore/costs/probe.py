"""Small measurements on a rank's own stage: forward and backward of a test chunk, time of its messages and host copies."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.data.batch import ChunkArrays
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Recompute
from megatron_epp.runtime.attention.layout import SegmentTable, SliceView
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.autograd.weights import DeferredGradient
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.tools.profiling import Timer, time_host_copies

_VOCABULARY = 32
"""Number of token ids that every model's vocabulary contains."""
_LINK_TOKENS = (64, 1024)
_LINK_REPEATS = 12
_COPIED_BYTES = (1 << 20, 1 << 25)


class Link(NamedTuple):
    """Costs of a message.

    Attributes:
        latency_us, us_per_byte: transfer time, in microseconds and in microseconds per byte.
        host_us: time of the computing thread, in microseconds, at either end; 0 on a GPU, where the host runs ahead.
    """

    latency_us: float = 0.0
    us_per_byte: float = 0.0
    host_us: float = 0.0


def measure_link(stage: MegatronStage, links: Links, rank: int) -> Link:
    """Measure messages between the first two ranks: half a round trip, the fastest of `_LINK_REPEATS`.

    Every rank of the pipeline may call this; those after the second return zeros at once.
    """
    if rank > 1 or len(links.ranks) < 2:
        return Link()
    points, host_us = [], []
    timer = Timer(stage.message(1)[2], alone=False)
    for tokens in _LINK_TOKENS:
        shape, dtype, device = stage.message(tokens)
        payload, best_us = torch.zeros(shape, dtype=dtype, device=device), math.inf
        for _ in range(_LINK_REPEATS):
            start_us, start_cpu_s = timer.now_us(), time.thread_time()
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
            best_us = min(best_us, (timer.now_us() - start_us) / 2)
        points.append(Point(payload.nbytes, 0, best_us))
    line = fit_line(points, pairs=False).line
    return Link(line.fixed_us, line.per_token_us, 0.0 if torch.cuda.is_initialized() else statistics.median(host_us))


def measure_host_link(device: torch.device) -> tuple[float, float]:
    """Measure copies to the host and back: latency in microseconds, and microseconds per byte. On a CPU, copies within host
    memory are measured instead.
    """
    line = fit_line(time_host_copies(device, _COPIED_BYTES), pairs=False).line
    return line.fixed_us, line.per_token_us


def _arrays(tokens: int) -> ChunkArrays:
    """Return varied tokens, so that a router spreads them, all at position 0, since a model may have few positions."""
    ids = torch.arange(tokens) % _VOCABULARY
    return ChunkArrays(ids, ids.clone(), torch.ones(tokens), torch.zeros_like(ids))


def forward(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute: Recompute = NO_RECOMPUTE
) -> tuple[Tensor | None, Tensor, ChunkContext]:
    tokens = chunk.num_tokens
    stage.begin(lambda _: _arrays(tokens))
    shape, dtype, device = stage.message(tokens)
    hidden = None if stage.is_first else ReceiveLeaf().enter(torch.randn(shape, dtype=dtype, device=device))
    context = ChunkContext(0, SegmentTable.build(chunk, tokens), stage.relay, view, recompute)
    return hidden, stage.forward(context, hidden), context


def backward(stage: MegatronStage, output: Tensor, context: ChunkContext, keep_weights: bool = False) -> None:
    stage.backward(context, output, None if stage.is_last else torch.ones_like(output), keep_weights)


def layers_of(stage: MegatronStage) -> torch.nn.ModuleList:
    """Return the transformer layers of a stage."""
    layers: Any = stage.decoder.layers
    return layers


def by_place(stage: MegatronStage, kept: list[DeferredGradient]) -> tuple[list[DeferredGradient], list[DeferredGradient]]:
    """Separate the weight gradients of the layers from the others."""
    inside = {id(weight) for weight in layers_of(stage).parameters()}
    return [one for one in kept if id(one.weight) in inside], [one for one in kept if id(one.weight) not in inside]
