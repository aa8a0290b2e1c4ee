"""Small measurements for offload: the time of a copy to the host, and the share of a chunk's bytes that can be offloaded."""

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
    """Measure copies to the host: latency in microseconds, and microseconds per byte, from the fastest of `_REPEATS` copies.

    On a CPU, copies within host memory are measured instead.
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
    """Share of the bytes a chunk keeps whose storage nothing else holds (0 to 1): the smallest over all recompute levels."""
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
