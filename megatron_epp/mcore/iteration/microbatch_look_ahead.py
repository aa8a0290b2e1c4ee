"""Agreement on the next iteration's microbatches, so that it is planned while the device runs the present one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from megatron_epp.mcore.iteration.microbatch_agreement import AgreedShapes, Shapes
from megatron_epp.plan import EppError

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

    def peek(self, count: int) -> list[Any]:
        """Return the next items without taking them; fewer where the iterator ends."""
        with suppress(StopIteration):
            while len(self._seen) < count:
                self._seen.append(next(self._iterator))
        return list(self._seen)[:count]


def installed(iterators: Sequence[Any]) -> list[LookAhead] | None:
    """Put a `LookAhead` beneath each of a rank's iterators, once, and return them; None if one is not Megatron's.

    Megatron's iterators replay items of an iteration, which they read from their attribute ``iterable``; that is not replayed.
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
    """Agreement on the shapes of the next iteration between all ranks that run the same plan, behind the launch of this one.

    Ranks must call `begin` and `take` at the same calls of the schedule, with equal counts. Given this rank's shapes, its error
    and the items, `agree` agrees with other ranks and starts to plan.
    """

    def __init__(self, agree: Callable[[Shapes | None, str, list[Any]], AgreedShapes]) -> None:
        self._agree = agree
        self._is_logged = False
        self._next: tuple[int, list[tuple[LookAhead, int]], AgreedShapes] | None = None

    def begin(self, sources: Sequence[LookAhead], count: int, shapes_of: Callable[[list[Any]], Shapes]) -> None:
        """Agree on the next iteration, when this one's microbatches have been taken. Ranks without data have no `sources`."""
        positions = [(source, source.num_taken) for source in sources]
        own, problem, items = None, "", list[Any]()
        try:
            items = [source.peek(count) for source in sources]
            shapes_of_chunks = list(map(shapes_of, items))
            own = shapes_of_chunks[0] if shapes_of_chunks else None
            if any(shapes != own for shapes in shapes_of_chunks) or (own is not None and len(own) < count):
                problem = "no microbatches to look ahead to"
        except Exception as error:  # a rank that raised by itself would leave the others waiting for its shapes
            problem = f"{type(error).__name__}: {error}"
        # An error is raised on all ranks, and they agree again; if it is still there, that agreement raises it at its turn.
        with suppress(EppError):
            self._next = count, positions, self._agree(own, problem, items)

    def take(self, sources: Sequence[LookAhead], count: int) -> AgreedShapes | None:
        """Return what was agreed for the iteration whose microbatches are taken next; None, on all ranks, if nothing was.
        Raises `EppError` if this rank's iterators are others than at `begin`, or have moved since.
        """
        begun, self._next = self._next, None
        if begun is None or begun[0] != count:
            return None
        _, positions, agreed = begun
        if positions != [(source, source.num_taken) for source in sources]:
            raise EppError(
                "the data iterator of this call is not the one of the last call, or something else took items from it; ranks "
                "without data already agreed on its next microbatches"
            )
        if not self._is_logged:
            logger.info("microbatches and plans are agreed while the last iteration ran, from now on")
            self._is_logged = True
        return agreed
