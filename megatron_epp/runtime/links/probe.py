"""Times messages between two ranks on this machine: over NCCL where there are two GPUs, over gloo otherwise."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.cost.fit import Point

_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24)
_REPEATS = 15


def measure_link(gpus: bool) -> list[Point]:
    """Return the time of a message by its bytes (as `tokens`): half of a round trip."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_epp.runtime.links.probe", "megatron_epp.runtime.tools.emulate"])
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        other = context.Process(target=_serve, args=(1, folder, gpus, results), daemon=True)
        first = context.Process(target=_serve, args=(0, folder, gpus, results), daemon=True)
        first.start()
        other.start()
        first.join()
        other.join()
        if first.exitcode or other.exitcode:
            raise RuntimeError(f"the two ranks that time the link ended with {first.exitcode} and {other.exitcode}")
        points: list[Point] = results.get()
        return points


def _serve(rank: int, folder: str, gpus: bool, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # or a barrier would meet on the first GPU, where both ranks would then be
    dist.init_process_group("nccl" if gpus else "gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    points = [Point(size, 0, _time_us(rank, torch.zeros(size, dtype=torch.uint8, device=device))) for size in _SIZES]
    if rank == 0:
        results.put(points)
    dist.barrier()
    dist.destroy_process_group()


def _time_us(rank: int, buffer: torch.Tensor) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        start_s = _now_s(buffer.device)
        for turn in (0, 1):
            (dist.send if rank == turn else dist.recv)(buffer, 1 - rank)
        times.append((_now_s(buffer.device) - start_s) * 1e6 / 2)
    return min(times[1:])  # what slows a message down is not the link


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
