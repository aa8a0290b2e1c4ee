"""How far a rank has got in its program: what a watchdog asks when nothing seems to happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A point in a device's queue, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has passed it."""


class Place(NamedTuple):
    """Position of an action in the program, and whether the rank waits there for the message it needs."""

    position: int
    receiving: bool = False


class Progress:
    """Follows host and device through a program.

    On a GPU the host only issues work and runs ahead. A message that never comes hangs the device, and the host perhaps never,
    or much later, in a place that has nothing to do with it. So every place the host leaves is marked in the device's queue.

    Args:
        mark: puts a mark into the device's queue; returns None where host and device are one.
    """

    def __init__(self, mark: Callable[[], Mark | None]) -> None:
        self.host: Place | None = Place(0)
        self._mark = mark
        self._issued: deque[tuple[Place, Mark]] = deque()

    def reach(self, place: Place | None) -> None:
        """The host has issued all of the place it was at and goes on to this one, or is done."""
        mark = self._mark()
        if mark is not None and self.host is not None:
            self._issued.append((self.host, mark))
        self.host = place

    def close(self) -> None:
        """The host has given up."""
        self.host = None

    def place(self) -> Place | None:
        """Where the rank is: at the first place the device has not passed, else where the host is. For one thread only."""
        while self._issued and self._issued[0][1].query():
            self._issued.popleft()
        return self._issued[0][0] if self._issued else self.host


def no_mark() -> None:
    """The mark of a device that is the host, or that nobody watches."""


def device_mark() -> Mark | None:
    """A mark in the queue of the current CUDA stream, if there is one."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
