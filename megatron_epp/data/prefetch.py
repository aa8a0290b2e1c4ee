"""An iterator that a thread runs a few items ahead of its consumer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator


class Prefetcher[T](Iterator[T]):
    """The items of another iterator, in order.

    If that raises, the items made before are still yielded, then `__next__` raises the error, then and at every later call.

    Args:
        items: the iterator, run by the thread only.
        depth: number of items that may wait, at least 1 (one more is being made).
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: queue.Queue[tuple[T] | BaseException] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._error: BaseException | None = None
        # The thread must not hold a reference to self, or a forgotten iterator would never be collected and never stop.
        self._thread = threading.Thread(target=_fill, args=(items, self._ready, self._stop), name="epp-prefetch", daemon=True)
        self._finalizer = weakref.finalize(self, _release, self._ready, self._stop)
        self._thread.start()

    def __next__(self) -> T:
        if self._error is None:
            if self._stop.is_set():
                raise StopIteration
            item = self._ready.get()
            if isinstance(item, tuple):
                return item[0]
            self._error = item
        raise self._error

    def is_ready(self) -> bool:
        """True if `__next__` would return, or raise, without waiting."""
        return self._error is not None or self._stop.is_set() or not self._ready.empty()

    def close(self) -> None:
        """Stop and drop the ready items; waits for the item being made. Afterwards the iterator is exhausted."""
        self._finalizer()
        self._thread.join()


def _fill[T](items: Iterator[T], ready: queue.Queue[tuple[T] | BaseException], stop: threading.Event) -> None:
    try:
        for item in items:
            ready.put((item,))
            if stop.is_set():
                return
        ready.put(StopIteration())
    except BaseException as error:  # an error of any kind must reach the consumer, or it would wait for ever
        ready.put(error)


def _release[T](ready: queue.Queue[tuple[T] | BaseException], stop: threading.Event) -> None:
    """Stop the thread: after `stop` it puts at most one item, for which emptying the queue makes room."""
    stop.set()
    try:
        while True:
            ready.get_nowait()
    except queue.Empty:
        pass
