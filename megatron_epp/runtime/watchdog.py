"""Ends a run that hangs, saying what it was waiting for."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EXIT_CODE = 70


class _Activity:
    """Something that must not stand still for longer than the limit."""

    __slots__ = ("closed", "describe", "failure", "limit_s", "place", "progress", "since_s")

    def __init__(self, describe: Callable[[], str], progress: Callable[[], object] | None, limit_s: float) -> None:
        self.describe = describe
        self.progress = progress
        self.limit_s = limit_s
        self.place: object = None
        self.closed = False
        self.failure: Exception | None = None
        self.since_s = time.monotonic()


class Watchdog:
    """A thread that watches what goes on and ends the process when something stands still for longer than a limit.

    A collective or receive that never completes blocks in native code, where no exception can reach it, or on the device, where
    the host does not even notice; ending the process is what lets the launcher end the others. Activities may lie inside each
    other; each has its own time.

    Args:
        limit_s: seconds without progress.
        on_expiry: called with the message instead of ending the process (for tests).
    """

    def __init__(self, limit_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        self.limit_s = limit_s
        self._on_expiry = on_expiry or self._end_process
        self._activities: list[_Activity] = []  # innermost last
        self._thread: threading.Thread | None = None

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
            self._thread = threading.Thread(target=self._run, name="epp-watchdog", daemon=True)
            self._thread.start()
        activity = _Activity(describe, progress, self.limit_s if limit_s is None else limit_s)
        self._activities.append(activity)
        try:
            yield
        finally:
            activity.closed = True
            if progress is None:
                self._activities.remove(activity)

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self.limit_s / 4))
            for activity in reversed(self._activities.copy()):
                self._look_at(activity)

    def _look_at(self, activity: _Activity) -> None:
        if activity.progress is not None:
            closed = activity.closed  # before asking: what the body does last must not be missed
            try:
                place = activity.progress()
            except Exception as error:  # a device that has failed raises when queried, and makes no progress
                place, activity.failure = activity.place, error
            else:
                if closed and place is None:
                    self._activities.remove(activity)
                    return
            if place != activity.place:
                activity.place, activity.since_s = place, time.monotonic()
        if time.monotonic() - activity.since_s > activity.limit_s:
            activity.since_s = math.inf
            self._on_expiry(self._message(activity))

    def _message(self, activity: _Activity) -> str:
        try:
            return activity.describe()
        except Exception as error:
            failure = activity.failure or error
            return f"no progress for {activity.limit_s:g} s (--epp-wait-limit-seconds): {type(failure).__name__}: {failure}"

    @staticmethod
    def _end_process(message: str) -> None:
        try:
            logger.critical("%s", message)
            logging.shutdown()
            faulthandler.dump_traceback()  # where every thread of this process stands
        finally:
            os._exit(EXIT_CODE)
