"""Work in the background of a rank's actions, one piece after another: on a side stream of a GPU, or in a `SideThread`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Background(Protocol):
    """Queue of work on another stream or thread. What uses a result calls what `start` has returned."""

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work, whose inputs are computed, and return a function that waits for its end.

        Args:
            work: launches kernels and collectives; no other thread may use its communicators.

        Returns:
            function that makes what follows wait for the work, and raises the error with which it ended, if any.
        """


class SideStream:
    """Work on a side stream of a GPU; launches are made at once, and waiting is left to the device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)
