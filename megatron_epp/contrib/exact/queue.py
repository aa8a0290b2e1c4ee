"""Batches that wait for the solver, which works in a process of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from megatron_epp.planner.service.worker import Worker

logger = logging.getLogger(__name__)

WAITING = 4
"""Batches that may wait for the solver; while that many do, others are not refined."""
NICENESS = 10
"""Niceness of the solver's process: training has priority."""


def tell_greedy(why: str) -> None:
    """Log that the greedy plan stays, and why."""
    logger.info("the plan is greedy's, the exact planner looks for no better one: %s", why)


class SolverQueue[K: Hashable]:
    """Queue of batches for the solver.

    Args:
        start: makes the function that the process calls for every batch.
        given: its arguments.
    """

    def __init__(self, start: Callable[..., Callable[[K], Any]], *given: Any) -> None:
        self.waiting: deque[K] = deque()  # oldest first
        self.worker = Worker(start, *given, niceness=NICENESS)
        self._told = set[str]()

    def ask(self, batch: K) -> None:
        """Have a batch solved, unless it waits already or too many do."""
        if batch not in self.waiting and len(self.waiting) < WAITING:
            self.worker.send(batch)
            self.waiting.append(batch)

    def answers(self) -> Iterator[tuple[K, Any]]:
        """Yield the batches that were solved since the last call, each with its answer. Raises what solving it raised."""
        while self.waiting and self.worker.is_ready():
            batch = self.waiting.popleft()
            yield batch, self.worker.receive()

    def tell_once(self, why: str) -> None:
        """Log why greedy plans stay, the first time that it is for this reason."""
        if why not in self._told:
            self._told.add(why)
            tell_greedy(why)

    def close(self) -> None:
        """End the process, and with it what is being solved."""
        self.worker.close()
