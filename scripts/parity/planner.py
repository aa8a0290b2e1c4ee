"""One planning process for all trainings of a process: it takes longer to start than to plan the tiny batches of a few."""

from __future__ import annotations

import functools
import threading
from typing import Any

from megatron_epp.port import planning
from megatron_epp.port.worker import Worker


def share_planner() -> None:
    """Have trainings that this process starts, and those it forks, plan in one each."""
    planning.Worker = _SharedWorker  # type: ignore[misc, assignment]


class _SharedWorker:
    """Stands in for `port.worker.Worker`: its process stays for the next, and is never nice."""

    def __init__(self, niceness: int = 0) -> None:
        del niceness

    def call(self, *args: Any) -> Any:
        """Call a function, as `Worker.call` does."""
        worker, lock = _process()
        with lock:
            return worker.call(*args)

    send = call

    def close(self) -> None:
        """Nothing: the process ends with this one."""


@functools.cache
def _process() -> tuple[Worker, threading.Lock]:
    return Worker(), threading.Lock()
