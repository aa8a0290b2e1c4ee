"""Ranks as processes of this machine, and the time of a message between two: over NCCL between GPUs, over gloo otherwise."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.cost.line_fits import Point
from megatron_epp.launch.machine import SHARED_GPUS
from megatron_epp.plan import EppError
from megatron_epp.runtime.timer import Timer

CONTEXT: Any = multiprocessing.get_context("forkserver")
"""Context of the processes, which makes what they share."""

_LEAVE_S = 10.0
"""Seconds that a rank which has finished has to exit, before it is killed. Not measured; a rank that exits takes far less."""
_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24)
"""Bytes of the messages that are timed, from mostly latency to mostly transfer."""
_REPEATS = 15
"""Messages of each size, of which the fastest counts. Not measured: fewer leave more of other programs' load in the result."""


def run_ranks[T](
    run: Callable[..., T], num_ranks: int, *args: Any, backend: str = "gloo", timeout_s: float = float("inf")
) -> list[T]:
    """Run a function on ranks that are processes of this machine; return their results in rank order.

    The function gets the rank and `args`; it must be a module's, since processes import it. The ranks form the default process
    group; with ``nccl`` every rank has the GPU of its number. Raises `EppError` if a rank failed, or the run took too long.
    """
    CONTEXT.set_forkserver_preload([__name__, run.__module__])
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        ranks = [
            CONTEXT.Process(target=_enter, args=(results, backend, store, num_ranks, run, rank, args), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            done = _collect(results, ranks, timeout_s)
            for process in ranks:
                process.join(_LEAVE_S)
        finally:
            for process in ranks:
                process.kill()
    return [done[rank] for rank in range(num_ranks)]


def _collect(results: Any, ranks: Sequence[Any], timeout_s: float) -> dict[int, Any]:
    deadline_s = time.monotonic() + timeout_s
    done: dict[int, Any] = {}
    while len(done) < len(ranks):
        try:
            rank, failure, result = results.get(timeout=max(0.0, min(1.0, deadline_s - time.monotonic())))
        except queue.Empty:
            if any(process.exitcode for process in ranks):
                raise EppError(f"the ranks ended with exit codes {[process.exitcode for process in ranks]}") from None
            if time.monotonic() >= deadline_s:
                left = len(ranks) - len(done)
                raise EppError(f"{left} of {len(ranks)} ranks have not ended after {timeout_s:.0f} s") from None
            continue
        if failure:
            raise EppError(f"rank {rank} failed: {failure}")
        done[rank] = result
    return done


def _enter(
    results: Any, backend: str, store: str, num_ranks: int, run: Callable[..., Any], rank: int, args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            if num_ranks > (gpus := torch.cuda.device_count()):
                os.environ[SHARED_GPUS] = "1"
            torch.cuda.set_device(rank % gpus)  # or a barrier would meet on the first GPU, where all ranks would then be
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_ranks)
        results.put((rank, "", run(rank, *args)))
        dist.barrier()  # a rank that left would break the others' links
    except Exception as error:
        results.put((rank, f"{error}" if isinstance(error, EppError) else traceback.format_exc(), None))


def measure_link(gpus: bool) -> list[Point]:
    """Return the time of a message by its bytes (as `tokens`): half of a round trip."""
    return run_ranks(_time_messages, 2, gpus, backend="nccl" if gpus else "gloo")[0]


def _time_messages(rank: int, gpus: bool) -> list[Point]:
    device, points = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu"), []
    timer = Timer(device, alone=False)
    for size in _SIZES:
        buffer, times_us = torch.zeros(size, dtype=torch.uint8, device=device), []
        for _ in range(_REPEATS + 1):
            start_us = timer.now_us()
            for turn in (0, 1):
                (dist.send if rank == turn else dist.recv)(buffer, 1 - rank)
            times_us.append((timer.now_us() - start_us) / 2)
        points.append(Point(size, 0, min(times_us[1:])))  # what slows a message down is not the link
    return points
