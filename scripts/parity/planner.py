"""One planning process for all trainings of a process: it takes longer to start than to plan the tiny batches of a few."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from megatron_epp.port import planning
from megatron_epp.port.worker import Worker

_numbers = itertools.count()


def share_planner() -> None:
    """Have trainings that this process starts, and those it forks, plan in one each."""
    planning.Worker = _SharedWorker  # type: ignore[misc, assignment]


class _SharedWorker:
    """Stands in for `port.worker.Worker`: what it makes lives in a process that stays for the next, never nice."""

    def __init__(self, make: str, *args: Any, niceness: int = 0) -> None:
        self._number = next(_numbers)
        self.send(make, *args)

    def send(self, make: str, *args: Any) -> None:
        """Make what is called, as `Worker.send` does where what was made before has only prepared something."""
        self.call(make, *args)

    def call(self, *args: Any) -> Any:
        """Call the worker, as `Worker.call` does; until something is made, make it."""
        worker, lock = _process()
        with lock:
            return worker.call(self._number, *args)

    def close(self) -> None:
        """Nothing: the process ends with this one."""


@functools.cache
def _process() -> tuple[Worker, threading.Lock]:
    return Worker("scripts.parity.planner:several"), threading.Lock()


def several() -> Callable[..., Any]:
    """Objects made in the process, by number."""
    functions: dict[int, Callable[..., Any] | None] = {}

    def work(number: int, *args: Any) -> Any:
        if (function := functions.get(number)) is not None:
            return function(*args)
        make, *rest = args
        functions[number] = resolve_name(make)(*rest)
        return None

    return work
