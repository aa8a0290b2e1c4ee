"""Agreement on the next iteration's microbatches, and its plan, in a thread while the present iteration runs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from megatron_epp.mcore.iteration.agreement import AgreedShapes, Shapes
from megatron_epp.plan import EppError
from megatron_epp.runtime.side_thread import this_device

logger = logging.getLogger(__name__)


class LookAhead(Iterator[Any]):
    """Iterator whose next items can be looked at before they are taken."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._seen = iterator, deque[Any]()
        self.num_taken = 0

    def __next__(self) -> Any:
        item = self._seen.popleft() if self._seen else next(self._iterator)
        self.num_taken += 1
        return item

    @property
    def seen(self) -> list[Any]:
        """Items that were looked at and not taken yet."""
        return list(self._seen)

    def peek(self, count: int) -> list[Any]:
        """Return the next items without taking them; fewer where the iterator ends."""
        with suppress(StopIteration):
            while len(self._seen) < count:
                self._seen.append(next(self._iterator))
        return list(self._seen)[:count]


def installed(iterators: Sequence[Any]) -> list[LookAhead] | None:
    """Put a `LookAhead` beneath each of a rank's iterators, once, and return them; None if one of them is of another kind.

    Megatron's own iterators replay an iteration's items by themselves and read new ones from their attribute ``iterable``, so
    what is seen ahead is not replayed.
    """
    ahead = []
    for iterator in iterators:
        if iterator is None:
            continue
        if not hasattr(iterator, "rewind") or not hasattr(getattr(iterator, "iterable", None), "__next__"):
            return None
        if not isinstance(iterator.iterable, LookAhead):
            iterator.iterable = LookAhead(iterator.iterable)
        ahead.append(iterator.iterable)
    return ahead


class Ahead:
    """Agreement on the shapes of the next iteration between all ranks that run the same plan, in a thread.

    Every rank must call `begin` and `take` at the same calls of the schedule, with equal counts.

    Args:
        agree: exchanges this rank's shapes, or its error, and the items themselves, returns what is agreed and plans it. It
            runs in the thread.
    """

    def __init__(self, agree: Callable[[Shapes | None, str, list[Any]], AgreedShapes]) -> None:
        self._agree = agree
        # One worker: it makes collective calls, which all ranks must make in the same order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="epp-ahead", initializer=this_device())
        self._is_told = False
        self._next: tuple[int, list[tuple[LookAhead, int]], Future[AgreedShapes]] | None = None

    def begin(self, sources: Sequence[LookAhead], count: int, shapes_of: Callable[[list[Any]], Shapes]) -> None:
        """Start to agree on the next iteration, while the present one runs. Its microbatches have been taken.

        Args:
            sources: of the rank's model chunks; none on a rank without data.
        """
        positions = [(source, source.num_taken) for source in sources]
        self._next = count, positions, self._thread.submit(self._agreed, sources, count, shapes_of)

    def _agreed(self, sources: Sequence[LookAhead], count: int, shapes_of: Callable[[list[Any]], Shapes]) -> AgreedShapes:
        mine, problem, items = None, "", list[Any]()
        try:
            items = [source.peek(count) for source in sources]
            known = list(map(shapes_of, items))
            mine = known[0] if known else None
            if any(shapes != mine for shapes in known) or (mine is not None and len(mine) < count):
                problem = "no microbatches to look ahead to"
        except Exception as error:  # a rank that raised by itself would leave the others waiting for its shapes
            problem = f"{type(error).__name__}: {error}"
        return self._agree(mine, problem, items)

    def wait(self) -> None:
        """Wait until the thread has finished."""
        if self._next is not None:
            self._next[2].exception()

    @property
    def held(self) -> list[Any]:
        """Items of the next iteration that are here already, once the thread has finished."""
        return [] if self._next is None else [source.seen for source, _ in self._next[1]]

    def take(self, sources: Sequence[LookAhead], count: int) -> AgreedShapes | None:
        """Return what was agreed for the iteration that begins; None, on all ranks, if nothing was agreed.

        Call it before its microbatches are taken.

        Raises:
            EppError: this rank's iterators are others than at `begin`, or have moved since.
        """
        begun, self._next = self._next, None
        if begun is None:
            return None
        planned_count, positions, future = begun
        # An error was raised on all ranks, and they agree again; if it is still there, that agreement raises it at its turn.
        if future.exception() is not None or planned_count != count:
            return None
        if positions != [(source, source.num_taken) for source in sources]:
            raise EppError(
                "the data iterator of this call is not the one of the last call, or something else took items from it; ranks "
                "without data already agreed on its next microbatches"
            )
        if not self._is_told:
            logger.info("microbatches and plans are agreed while the last iteration ran, from now on")
            self._is_told = True
        return future.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
