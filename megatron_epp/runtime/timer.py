"""Times of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from megatron_epp.cost.line_fits import Point

_LEAST_RUNS, _MOST_RUNS, _ENOUGH_S = 3, 15, 0.1
"""Runs of a measurement: at least so many, then up to so many within these seconds."""


class Timer:
    """Clock of a device.

    A single host thread (`alone`: no other process takes part) is timed by processor time, so that other programs do not count.
    Where others compute too, or wait for each other, which uses no processor time, wall time is read.
    """

    def __init__(self, device: torch.device, *, alone: bool = True) -> None:
        self._on_gpu = device.type == "cuda"
        host_alone = alone and not self._on_gpu and torch.get_num_threads() == 1
        self._now_s = time.thread_time if host_alone else time.perf_counter

    def now_us(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._now_s() * 1e6

    def median_us(self, run: Callable[..., object], prepare: Callable[[], object] | None = None) -> float:
        """Return the median time of runs after a warm-up. `run` takes what `prepare` returns, which is not timed."""
        times: list[float] = []
        began_s = time.perf_counter()
        while len(times) <= _LEAST_RUNS or (len(times) <= _MOST_RUNS and time.perf_counter() - began_s < _ENOUGH_S):
            inputs = () if prepare is None else (prepare(),)
            start_us = self.now_us()
            run(*inputs)
            times.append(self.now_us() - start_us)
        return statistics.median(times[1:])


def time_host_copies(device: torch.device, sizes: Iterable[int]) -> list[Point]:
    """Time copies of these sizes in bytes to pinned host memory and back; without a GPU, between two buffers."""
    timer, points = Timer(device), []
    for num_bytes in sizes:
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for source, target in ((there, here), (here, there)):
            points.append(Point(num_bytes, 0, timer.median_us(lambda source=source, target=target: target.copy_(source))))
    return points
