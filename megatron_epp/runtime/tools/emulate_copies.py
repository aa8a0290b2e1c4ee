"""Copies of an emulated rank: timed waits in a thread of their own, one at a time among ranks that share a link."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.runtime.autograd.saved import Owner
from megatron_epp.runtime.offload.activations import Timed

Locks = Mapping[tuple[int, Op], Any]
"""Locks by host link and direction (offload or load), each held by the rank that is copying."""


def host_locks(plan: Plan, context: Any) -> Locks:
    """Return locks, from a multiprocessing context, for all host links that several ranks share."""
    links = plan.host_links
    return {(link, op): context.Lock() for link in set(links) if links.count(link) > 1 for op in (Op.O, Op.L)}


class WaitingOffload:
    """Implements `runtime.executor.Mover` by timed waits: each copy waits for its link, then for its planned time.

    Args:
        plan: the plan that is emulated.
        rank: the rank whose copies are emulated.
        locks: locks of the links that ranks share.
        scale: seconds per planned second.
        record: called with each copy's action, start and end, in seconds of the monotonic clock.
    """

    def __init__(
        self, plan: Plan, rank: int, locks: Locks, scale: float, record: Callable[[Action, float, float], None]
    ) -> None:
        self.loaded_s = 0.0
        self._times_us = {copy.action: copy.time_us for copy in plan.copies[rank]}
        self._link = plan.host_links[rank] if plan.host_links else rank
        self._locks, self._scale, self._record = locks, scale, record
        self._done = {action: threading.Event() for action in self._times_us}
        self._ended_s: dict[Action, float] = {}
        self._issued: queue.SimpleQueue[Action] = queue.SimpleQueue()
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        while True:
            action = self._issued.get()
            with self._locks.get((self._link, action.op), nullcontext()):
                start_s = time.monotonic()
                time.sleep(self._times_us[action] * self._scale * 1e-6)
                self._ended_s[action] = time.monotonic()
            self._record(action, start_s, self._ended_s[action])
            self._done[action].set()

    def forward_of(self, owner: Owner) -> AbstractContextManager[None]:
        return nullcontext()

    def out(self, owner: Owner, share: float, timed: Timed) -> None:
        self._issued.put(Action(Op.O, *owner))

    def free(self, owner: Owner) -> None:
        self._done[Action(Op.O, *owner)].wait()

    def back(self, owner: Owner, timed: Timed) -> None:
        self._issued.put(Action(Op.L, *owner))

    def before_backward(self, owner: Owner) -> None:
        load = Action(Op.L, *owner)
        if load in self._done:
            self._done[load].wait()
            self.loaded_s = self._ended_s[load]

    def assert_empty(self) -> None:
        """Raise `EppError` if a copy has not ended."""
        if left := [str(action) for action, done in self._done.items() if not done.is_set()]:
            raise EppError(f"copies have not ended: {' '.join(left)}")
