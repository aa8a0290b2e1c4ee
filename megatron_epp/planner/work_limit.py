"""Work of planning, counted in steps, so that a limit of it gives the same answer on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

ORDER_STEPS, COPIES_STEPS = 1, 8
"""Steps of work of an action in an order that is tried without copies, and in a choice of copies, by the times of both."""


class WorkSpentError(Exception):
    """A limit of work was reached. No `EppError`, so that nothing takes it for the refusal of a plan."""


@dataclass(slots=True)
class Work:
    """Work that was done, and its limit, in steps."""

    limit: float = math.inf
    steps: int = 0


_WORK = ContextVar[Work | None]("work", default=None)


@contextmanager
def limited(limit: float) -> Iterator[Work]:
    """Count the work of the block, which ends with `WorkSpentError` before it exceeds its limit or an enclosing block's."""
    outer = _WORK.get()
    work = Work(limit if outer is None else min(limit, outer.limit - outer.steps))
    token = _WORK.set(work)
    try:
        yield work
    finally:
        _WORK.reset(token)
        if outer is not None:
            outer.steps += work.steps


def spend(num_actions: int, steps: int = ORDER_STEPS) -> None:
    """Count work. Raises `WorkSpentError` where it is beyond the limit."""
    work = _WORK.get()
    if work is not None:
        if work.steps + num_actions * steps > work.limit:
            raise WorkSpentError
        work.steps += num_actions * steps
