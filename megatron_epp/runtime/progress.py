"""Progress of host and device through a rank's program, queried by the watchdog."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A point in a device's queue, such as a CUDA event."""

    def query(self) -> bool:
        """Return True if the device has passed it."""


class Place(NamedTuple):
    """Position of an action in the program; `receiving` is True while the rank waits there for the action's message."""

    position: int
    receiving: bool = False


class Progress:
    """Tracks the position of host and device in a program.

    On a GPU the host only issues work and runs ahead. A message that never arrives hangs the device, but the host never, or
    much later at an unrelated action. So a mark is put into the device's queue for every place the host leaves.

    Args:
        mark: puts a mark into the device's queue; returns None if host and device are the same.
    """

    def __init__(self, mark: Callable[[], Mark | None]) -> None:
        self.host: Place | None = Place(0)
        self._mark = mark
        self._issued: deque[tuple[Place, Mark]] = deque()

    def reach(self, place: Place | None) -> None:
        """Record that the host has issued all work of its current place and goes on to `place`, or is done (None)."""
        mark = self._mark()
        if mark is not None and self.host is not None:
            self._issued.append((self.host, mark))
        self.host = place

    def close(self) -> None:
        """Record that the host has stopped."""
        self.host = None

    def place(self) -> Place | None:
        """Return the first place that the device has not passed, else the host's place. Must be called from one thread only."""
        while self._issued and self._issued[0][1].query():
            self._issued.popleft()
        return self._issued[0][0] if self._issued else self.host


def no_mark() -> None:
    """Return no mark, for a device that is the host itself or that no watchdog monitors."""


def device_mark() -> Mark | None:
    """Put a mark into the queue of the current CUDA stream; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
