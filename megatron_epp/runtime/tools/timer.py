"""Times of passes and copies on a device, read when the device has finished what it was given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from megatron_epp.cost.fit import Point

_LEAST_RUNS, _MOST_RUNS, _ENOUGH_S = 3, 15, 0.2


class Timer:
    """Clock of a device.

    Where a single host thread computes, it reads processor time, so that other programs on the machine do not count. Where
    others compute too, or wait for each other, which uses no processor time, it reads wall time.
    """

    def __init__(self, device: torch.device, *, alone: bool = True) -> None:
        """Choose the clock.

        Args:
            device: where the work runs.
            alone: no other process takes part in the work.
        """
        self._on_gpu = device.type == "cuda"
        host_alone = alone and not self._on_gpu and torch.get_num_threads() == 1
        self._now_s = time.thread_time if host_alone else time.perf_counter

    def now_us(self) -> float:
        """Wait for the device and read the clock, in microseconds."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._now_s() * 1e6

    def median_us(self, run: Callable[..., object], prepare: Callable[[], object] | None = None) -> float:
        """Median time of runs after a warm-up.

        Args:
            run: the work; it takes what `prepare` returns, if that is given.
            prepare: runs untimed before each.
        """
        times: list[float] = []
        began_s = time.perf_counter()
        while len(times) <= _LEAST_RUNS or (len(times) <= _MOST_RUNS and time.perf_counter() - began_s < _ENOUGH_S):
            given = () if prepare is None else (prepare(),)
            start_us = self.now_us()
            run(*given)
            times.append(self.now_us() - start_us)
        return statistics.median(times[1:])


def time_host_copies(device: torch.device, sizes: Iterable[int]) -> list[Point]:
    """Time copies to pinned host memory and back, with bytes for tokens; without a GPU, between two buffers.

    Args:
        device: the device.
        sizes: bytes of the copies.
    """
    timer, points = Timer(device), []
    for num_bytes in sizes:
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for source, target in ((there, here), (here, there)):
            points.append(Point(num_bytes, 0, timer.median_us(lambda source=source, target=target: target.copy_(source))))
    return points
