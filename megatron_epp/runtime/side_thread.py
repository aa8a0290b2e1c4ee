"""Work in the background of a rank's actions, one piece after another: in a thread, or on a side stream of a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from megatron_epp.runtime.failures import PATIENCE_S

logger = logging.getLogger(__name__)


def this_device() -> Callable[[], None]:
    """Return a function that makes its thread use the GPU of this thread.

    A thread begins with the node's first GPU, and would make a context there, of hundreds of megabytes, in each process.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


class SideThread:
    """Thread for collectives on CPU, which block, and for what must not keep the training thread waiting.

    It does not keep the process alive: a rank that has failed must not wait for collectives that never end.
    """

    def __init__(self, name: str = "epp-reductions") -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        # The device is read here, in the thread that has chosen it. One thread for all work: collectives of a communicator must
        # be launched in the same order on all ranks.
        Thread(target=_serve, args=(self._queue, this_device()), name=name, daemon=True).start()

    def submit[T](self, work: Callable[[], T]) -> Future[T]:
        done = Future[T]()
        self._queue.put((work, done))
        return done

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue work whose inputs are computed; return a function that makes what follows wait for its end, or raises its
        error. Work launches kernels and collectives, and no other thread may use its communicators.
        """
        return self.submit(work).result


class SideStream:
    """Work on a side stream of a GPU; launches are made at once, and waiting is left to the device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())  # where the inputs are computed
        with torch.cuda.stream(self._stream):
            work()
            event = self._stream.record_event()
        # An event, not the stream: later work on the side stream does not delay what waits for this.
        return lambda: torch.cuda.current_stream().wait_event(event)


type Background = SideThread | SideStream
"""Queue of work on another thread or stream. What uses a result calls what `start` has returned."""


def complete_at_end(complete: Callable[[float | None], None]) -> None:
    """Complete the last work of a thread when a run ends: a group must not be destroyed while a collective uses it.

    After a failure, when other ranks may not take part any more, `complete` gets `PATIENCE_S`, and its errors are not raised.
    """
    if sys.exception() is None:
        complete(None)
        return
    try:
        complete(PATIENCE_S)
    except Exception as error:  # what has failed is raised already
        logger.debug("the last work of a thread is not complete: %s: %s", type(error).__name__, error)


def _serve(queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]], use_device: Callable[[], None]) -> None:
    use_device()
    while True:
        work, done = queue.get()
        try:
            result = work()
        except BaseException as error:  # raised again where the result is needed
            done.set_exception(error)
        else:
            done.set_result(result)
            del result
        del work, done  # or their tensors would stay alive until the next piece of work comes
