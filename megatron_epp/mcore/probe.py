"""Small measurements on a rank's own stage: what a chunk makes autograd keep, and how long it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_epp.cost import Line, StageCosts, causal_pairs
from megatron_epp.data.batch import ChunkArrays
from megatron_epp.mcore.stage import MegatronStage
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.meter import SavedTensorMeter
from megatron_epp.runtime.segments import SegmentTable
from megatron_epp.schedule import Chunk, Segment

_BYTES_TOKENS = 256
_TIME_TOKENS = (256, 1024)
_PACKED_IN = 8
_REPEATS = 3


def measure_bytes(stage: MegatronStage, costs: StageCosts) -> StageCosts:
    """Bytes per token that a chunk keeps: of a layer, from one layer more that recomputes; of all else; and of the head.

    Where layers recompute a stage keeps a little more (rotary angles, as an input of what runs again); that counts as the
    stage's own whether they do or not, so that a plan promises too much rather than too little. The head is known by what the
    first layer to recompute finds room in.
    """
    layers = stage.num_layers
    kept, peak = _kept_and_peak(stage, layers)
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
    """Fit the stage's lines to few, many and packed tokens; what is not the layers' own goes to the stage's extras."""
    points = [(tokens, segments) for tokens in _TIME_TOKENS for segments in (1, _PACKED_IN)]
    rows, forward, backward, head_forward, head_backward = [], [], [], [], []
    for tokens, segments in points:
        chunk = _synthetic(tokens, segments)
        rows.append((1.0, float(tokens), float(sum(causal_pairs(0, s.num_tokens) for s in chunk.segments))))
        total, block = _time_pass(stage, chunk)
        forward.append(block[0])
        backward.append(block[1])
        head_forward.append(total[0] - block[0])
        head_backward.append(total[1] - block[1])
    layers = max(1, stage.num_layers)
    return replace(
        costs,
        forward=_fit(rows, forward).scaled(1 / layers),
        backward=_fit(rows, backward).scaled(1 / layers),
        extra_forward=_fit([r[:2] for r in rows], head_forward),
        extra_backward=_fit([r[:2] for r in rows], head_backward),
    )


def _synthetic(tokens: int, segments: int = 1) -> Chunk:
    each = tokens // segments
    return Chunk(tuple(Segment(i, 0, each) for i in range(segments)))


def _arrays(tokens: int) -> ChunkArrays:
    ids = torch.zeros(tokens, dtype=torch.long)  # positions too: learned ones may be fewer than the probe's tokens
    return ChunkArrays(ids, ids.clone(), torch.ones(tokens), ids.clone())


def _forward(stage: MegatronStage, chunk: Chunk, recompute_layers: int = 0) -> tuple[Tensor | None, Tensor, ChunkContext]:
    tokens = chunk.num_tokens
    stage.begin(lambda _: _arrays(tokens), lambda: None)
    shape, dtype, device = stage.message(tokens)
    hidden = None if stage.is_first else torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    context = ChunkContext(0, SegmentTable.build(chunk, tokens), stage.relay, recompute_layers=recompute_layers)
    return hidden, stage.forward(context, hidden), context


def _backward(stage: MegatronStage, output: Tensor, context: ChunkContext) -> None:
    stage.backward(context, output, None if stage.is_last else torch.ones_like(output))


def _kept_and_peak(stage: MegatronStage, recompute_layers: int) -> tuple[float, float]:
    """Bytes per token that autograd keeps between forward and backward, and the most it keeps in either."""
    meter = SavedTensorMeter(stage.model.parameters())
    with meter:
        _, output, context = _forward(stage, _synthetic(_BYTES_TOKENS), recompute_layers)
        kept = meter.live_bytes
        _backward(stage, output, context)
    return kept / _BYTES_TOKENS, meter.peak_bytes / _BYTES_TOKENS


def _time_pass(stage: MegatronStage, chunk: Chunk) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median ``(forward, backward)`` microseconds of the whole stage and of its layers alone."""
    runs = [_time_once(stage, chunk) for _ in range(_REPEATS + 1)][1:]
    medians = [statistics.median(column) for column in zip(*runs, strict=True)]
    return (medians[0], medians[1]), (medians[2], medians[3])


def _time_once(stage: MegatronStage, chunk: Chunk) -> tuple[float, float, float, float]:
    clock: dict[str, float] = {}
    handles = _clock_layers(stage.decoder, lambda name: clock.__setitem__(name, _now_us()))
    try:
        clock["forward"] = _now_us()
        _, output, context = _forward(stage, chunk)
        clock["middle"] = _now_us()
        _backward(stage, output, context)
        clock["end"] = _now_us()
    finally:
        for handle in handles:
            handle.remove()
    total_backward = clock["end"] - clock["middle"]
    block_backward = clock.get("block gradient out", clock["end"]) - clock.get("block gradient in", clock["middle"])
    return clock["middle"] - clock["forward"], total_backward, clock["block out"] - clock["block in"], block_backward


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


def _fit(rows: list[tuple[float, ...]], times_us: list[float]) -> Line:
    """Least squares with weights against the large points' dominance; no coefficient below zero."""
    weights = 1.0 / np.maximum(np.asarray(times_us), 1.0)
    matrix, target = np.asarray(rows) * weights[:, None], np.asarray(times_us) * weights
    active = list(range(matrix.shape[1]))
    solution = np.zeros(3)
    while active:
        part = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if (part >= 0).all():
            solution[active] = part
            break
        active.pop(int(part.argmin()))
    return Line(*solution.tolist())
