"""Work in the background of a rank's actions, one piece after another: on a side stream of a GPU, or in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
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


class SideThread:
    """Work in a thread of its own, for collectives on CPU, which block.

    The thread does not keep the process alive: a rank that has failed must not wait for collectives that never end.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        Thread(target=_serve, args=(self._queue,), name="epp-reductions", daemon=True).start()

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        done = Future[None]()
        self._queue.put((work, done))
        return done.result


def _serve(queue: SimpleQueue[tuple[Callable[[], None], Future[None]]]) -> None:
    while True:
        work, done = queue.get()
        try:
            work()
        except BaseException as error:  # raised again where the result is needed
            done.set_exception(error)
        else:
            done.set_result(None)
        del work, done  # the tensors that the work refers to
