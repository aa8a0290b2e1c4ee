"""Small measurements for offload: how long a copy to the host takes, and what of a chunk's bytes can leave at all."""

from __future__ import annotations

import math
import time

import torch

from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.mcore.costs.memory_probe import bytes_chunk
from megatron_epp.mcore.costs.probe import forward
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import LEVELS, NO_RECOMPUTE, Recompute
from megatron_epp.runtime.autograd.saved import SavedTensors

_COPIED_BYTES = (1 << 20, 1 << 25)
_REPEATS = 8


def measure_host_link(device: torch.device) -> tuple[float, float]:
    """Latency in microseconds, and microseconds per byte, of copies to the host: the fastest of some.

    On a CPU, where the host stands for itself, of copies in its memory.
    """
    points = []
    for num_bytes in _COPIED_BYTES:
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        best_us = math.inf
        for _ in range(_REPEATS):
            _wait(device)
            start_s = time.perf_counter()
            here.copy_(there, non_blocking=True)
            _wait(device)
            best_us = min(best_us, (time.perf_counter() - start_s) * 1e6)
        points.append(Point(num_bytes, 0, best_us))
    line = fit_line(points, pairs=False).line
    return line.fixed_us, line.per_token_us


def measure_offloadable_share(stage: MegatronStage) -> float:
    """Of the bytes that a chunk keeps, what nobody else holds; the least over all levels of recompute."""
    layers = stage.num_layers
    levels = [NO_RECOMPUTE, *(Recompute(**{name: layers}) for name in LEVELS)]
    return min(_offloadable_share(stage, recompute) for recompute in levels)


def _offloadable_share(stage: MegatronStage, recompute: Recompute) -> float:
    saved = SavedTensors(stage.parameters)
    with saved:
        with saved.of((0, 0)):
            _, output, _ = forward(stage, bytes_chunk(stage), recompute=recompute)
        kept = saved.pop((0, 0))
        movable = sum(storage.num_bytes for storage in kept if storage.is_ours)
        share = movable / max(1, sum(storage.num_bytes for storage in kept))
        del output
    return share


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
