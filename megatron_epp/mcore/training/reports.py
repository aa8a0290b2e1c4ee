"""Reports of iterations in a thread, so that training waits neither for the device nor for other ranks' figures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from megatron_epp.runtime.side_thread import SideThread

Log = Callable[[], None]
"""Function that writes a report's lines to the log and the writers."""


class Reports:
    """The reports of a run, at most one of which is under way.

    A report is made in a thread, with collectives on groups that nothing else uses, so every rank must begin the same reports
    in the same order. Its lines are written in the training thread, at the next iteration: the writers of TensorBoard and W&B
    are not made for threads, and W&B drops the figures of a step that come after those of a later one.
    """

    def __init__(self) -> None:
        self._thread: SideThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._under_way: Future[Log | None] | None = None

    def begin(self, work: Callable[[], Log | None]) -> None:
        """Complete the report under way, and begin another. `work` returns what is to be called in the training thread, if any.

        On a GPU it runs on a stream of its own.
        """
        self.complete()
        if self._thread is None:
            self._thread = SideThread("epp-reports")
            self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        self._under_way = self._thread.submit(partial(_on_stream, self._stream, work))

    def complete(self, limit_s: float | None = None) -> None:
        """Wait for the report under way, and write its lines. Raises its error, or `TimeoutError` after `limit_s` seconds."""
        begun, self._under_way = self._under_way, None
        if begun is not None and (log := begun.result(limit_s)) is not None:
            log()


def _on_stream(stream: torch.cuda.Stream | None, work: Callable[[], Log | None]) -> Log | None:
    with torch.cuda.stream(stream):
        return work()
