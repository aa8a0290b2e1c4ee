"""Watchdog that ends a run that hangs and says what it was waiting for, and the progress of host and device that it watches."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_epp.runtime.failures import PATIENCE_S, FailureBoard
from megatron_epp.runtime.side_thread import this_device

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Exit code of a rank that stood still; a program's own fault has 70."""


@dataclass(slots=True, eq=False)
class _Activity:
    describe: Callable[[], str]
    progress: Callable[[], object] | None
    limit_s: float
    use_device: Callable[[], None] = field(default_factory=this_device)  # of the thread that is watched
    point: object = None
    closed: bool = False
    failure: Exception | None = None
    since_s: float = field(default_factory=lambda: time.monotonic())


class Watchdog:
    """Thread that watches activities and ends the process when something makes no progress for longer than `limit_s` seconds.

    A collective or receive that never completes blocks in native code, where no exception can reach it, or on the device, where
    the host does not even notice; ending the process lets the launcher end the others. Activities may lie inside each other.

    Args:
        on_expiry: called with the message instead of ending the process, for tests.
        failures: where other ranks say that they failed. This process ends then too, from its first activity on.
        limit_name: setting of the limit, for messages; empty if no user has set it.
    """

    def __init__(
        self,
        limit_s: float,
        on_expiry: Callable[[str], None] | None = None,
        failures: FailureBoard | None = None,
        limit_name: str = "wait_limit_seconds",
    ) -> None:
        self.limit_s, self.limit_name = limit_s, limit_name
        self._on_expiry, self._failures = on_expiry, failures
        self.note = ""
        """Lines behind the message, of what is known to make activities stand still."""
        # Innermost last. Several threads append and remove, which the interpreter's lock makes atomic; looks are at a copy.
        self._activities: list[_Activity] = []
        self._thread: threading.Thread | None = None
        self._looks = threading.Lock()

    @contextmanager
    def watch(
        self, describe: Callable[[], str], progress: Callable[[], object] | None = None, limit_s: float | None = None
    ) -> Iterator[None]:
        """Watch the body.

        Args:
            describe: gives the message; called only when the limit is passed.
            progress: how far the activity has got; a new answer starts its time again. None says that nothing is under way.
                Without it, the activity may take the limit as a whole and ends with the body; with it, what the body leaves
                under way is watched until the answer is None.
            limit_s: of this activity, where it is another.
        """
        if self._thread is None:
            every_s = min(1.0, self.limit_s / 4)  # a hang is told at most a quarter of its limit late
            looking = weakref.ref(self), every_s
            self._thread = threading.Thread(target=_look_often, args=looking, name="epp-watchdog", daemon=True)
            self._thread.start()
            # Python ends a thread that returns from native code while the interpreter shuts down, and C++ takes that for a
            # fault: the process aborts ("terminate called without an active exception") behind a training that is done.
            atexit.register(self._looks.acquire, timeout=PATIENCE_S)
        activity = _Activity(describe, progress, self.limit_s if limit_s is None else limit_s)
        self._activities.append(activity)
        try:
            yield
        finally:
            activity.closed = True
            if progress is None:  # otherwise the watchdog removes it, once the device has passed what the body launched
                self._activities.remove(activity)

    def look(self) -> bool:
        """Look at every activity; return False if there is nothing more to look at, for another rank has failed."""
        with self._looks:  # the shutdown of the interpreter takes it for good, and looks end
            if self._failures is not None and (text := self._failures.poll()):
                (self._on_expiry or self._end_after)(text)
                return False
            for activity in reversed(self._activities.copy()):  # the innermost says most about what hangs
                self._look_at(activity)
        return True

    def _look_at(self, activity: _Activity) -> None:
        if activity.progress is not None:
            closed = activity.closed  # before asking: what the body does last must not be missed
            try:
                activity.use_device()  # else a query of an event would make a context on the node's first GPU
                point = activity.progress()
            except Exception as error:  # a device that has failed raises when queried, and makes no progress
                point, activity.failure = activity.point, error
            else:
                if closed and point is None:
                    self._activities.remove(activity)
                    return
            if point != activity.point:
                activity.point, activity.since_s = point, time.monotonic()
        if time.monotonic() - activity.since_s > activity.limit_s:
            activity.since_s = math.inf  # told once
            (self._on_expiry or self._end_process)(self._message(activity))

    def _message(self, activity: _Activity) -> str:
        try:
            return activity.describe() + self.note
        except Exception as error:
            failure = activity.failure or error
            return f"no progress for {self.limit(activity.limit_s)}: {type(failure).__name__}: {failure}"

    def limit(self, limit_s: float | None = None) -> str:
        """Format a limit, by default the watchdog's own, with the setting that changes it."""
        return f"{self.limit_s if limit_s is None else limit_s:g} s" + f" ({self.limit_name})" * bool(self.limit_name)

    @staticmethod
    def _end_process(message: str) -> None:
        try:
            logger.critical("%s", message)
            logging.shutdown()
            faulthandler.dump_traceback()  # where every thread of this process stands
        finally:
            os._exit(EXIT_CODE)  # no exit handlers: they would wait for the collective that hangs

    def _end_after(self, text: str) -> None:
        """End the process because another rank failed, which ends first: a launcher names the first that ends."""
        try:
            logger.critical("%s", text)
            logging.shutdown()
            assert self._failures is not None  # it gave the text
            self._failures.acknowledge()
            time.sleep(PATIENCE_S)
        finally:
            os._exit(EXIT_CODE)


def _look_often(reference: weakref.ref[Watchdog], pause_s: float) -> None:
    """Let a watchdog look until it is gone. Between looks this thread keeps neither it nor, through an activity, a training."""
    while True:
        time.sleep(pause_s)
        if (watchdog := reference()) is None or not watchdog.look():
            return
        del watchdog


class ProgressPoint(NamedTuple):
    """Position of an action in the program; `receiving` is True while the rank waits there for the action's message."""

    position: int
    receiving: bool = False


class Progress:
    """Positions of host and device in a program.

    On a GPU the host only issues work and runs ahead. A message that never arrives hangs the device, but the host never, or
    much later at an unrelated action. So `mark` puts a mark into the device's queue for every place the host leaves. It returns
    None if host and device are the same.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self.host: ProgressPoint | None = ProgressPoint(0)
        self._mark = mark
        self._issued: deque[tuple[ProgressPoint, Any]] = deque()

    def reach(self, point: ProgressPoint | None) -> None:
        """Record that the host has issued all work of its current place and goes on to `point`, or is done (None)."""
        mark = self._mark()
        if mark is not None and self.host is not None:
            self._issued.append((self.host, mark))
        self.host = point  # last: the watchdog's thread must not see the new place before the mark of the old one

    def close(self) -> None:
        self.host = None

    def point(self) -> ProgressPoint | None:
        """Return the first place that the device has not passed, else the host's place. Must be called from one thread only."""
        while self._issued and self._issued[0][1].query():  # a query does not wait
            self._issued.popleft()  # the only thread that pops; the training thread appends at the other end
        return self._issued[0][0] if self._issued else self.host


def device_mark() -> Any:
    """Put a mark into the queue of the current CUDA stream; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream().record_event()
