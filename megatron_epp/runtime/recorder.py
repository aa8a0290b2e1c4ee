"""Measured start and end times of actions, and times of collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_epp.plan import Action


def mark() -> Any:
    """Return the present time: an event on the current stream of a GPU, otherwise seconds of the host's clock."""
    if torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # a thread that waits for it sleeps
        event.record()
        return event
    return time.perf_counter()


def elapsed_us(start: Any, end: Any) -> float:
    """Return the time between two marks in microseconds. On a GPU this waits until the device has reached the second."""
    if isinstance(start, float):
        return float(end - start) * 1e6
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


@dataclass(slots=True)
class Recorder:
    """Times of one rank's actions in one iteration, in microseconds from its start.

    Compute, copies, and waits for messages are recorded, each wait under the name of its receive. On a GPU the times are the
    device's (events on the current stream), and every action is an NVTX range. Otherwise they are wall-clock times, and the
    processor time of the thread is recorded too, which is smaller if other programs use the core.
    """

    enabled: bool = True
    wait_us: float = 0.0
    _origin: Any = None
    _marks: list[tuple[Action, Any, Any, float | None]] = field(default_factory=list)
    _collectives: list[tuple[Action, Any, Any]] = field(default_factory=list)

    def begin(self) -> None:
        self._marks.clear()
        self._collectives.clear()
        self.wait_us = 0.0
        self._origin = mark() if self.enabled else None

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action on the current stream, and name it for profilers of the device."""
        with torch.cuda.nvtx.range(str(action)) if torch.cuda.is_initialized() else nullcontext():
            if not self.enabled:
                yield
                return
            start, cpu_s = mark(), time.thread_time()
            yield
            cpu_us = (time.thread_time() - cpu_s) * 1e6
            end = mark()
            self._marks.append((action, start, end, cpu_us if isinstance(end, float) else None))

    @contextmanager
    def waiting(self, receive: Action) -> Iterator[None]:
        """Time the wait for a message. `wait_us` grows by the host's waiting time: about 0 on a GPU, where the device waits."""
        start = time.perf_counter()
        with self.action(receive):
            yield
        self.wait_us += (time.perf_counter() - start) * 1e6

    def collective(self, action: Action) -> Callable[[], None]:
        """Start to time a collective, which overlaps with actions; return a function to call, on its stream, at its end."""
        if not self.enabled:
            return lambda: None
        start = mark()
        return lambda: self._collectives.append((action, start, mark()))

    def collectives(self) -> list[tuple[Action, float]]:
        """Return every collective with the time from this rank's entry to its end. On a GPU this waits for the device."""
        return [(action, elapsed_us(start, end)) for action, start, end in self._collectives]

    def took_us(self) -> Iterator[tuple[Action, float]]:
        for action, start, end, _ in self._marks:
            yield action, elapsed_us(start, end)

    def events(self) -> tuple[tuple[str, float, float, float | None], ...]:
        """Return ``(action, start_us, end_us, cpu_us)`` by start. On a GPU this waits for the device, and `cpu_us` is None."""
        origin = self._origin
        events = [(str(a), elapsed_us(origin, s), elapsed_us(origin, e), cpu_us) for a, s, e, cpu_us in self._marks]
        return tuple(sorted(events, key=lambda event: event[1]))
