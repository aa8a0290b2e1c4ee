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


class Activity:
    """Something that must not take longer than the limit."""

    __slots__ = ("describe", "since_s")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.since_s = time.monotonic()

    def renew(self) -> None:
        """It has got on: its time starts again."""
        self.since_s = time.monotonic()


class Watchdog:
    """A thread that watches what goes on and ends the process when something outlasts a limit.

    A collective or receive that never completes blocks in native code, where no exception can reach it; ending the process is
    what lets the launcher end the others. Activities may lie inside each other; each has its own time.

    Args:
        limit_s: seconds one activity may take without being renewed.
        on_expiry: called with the message instead of ending the process (for tests).
    """

    def __init__(self, limit_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        self.limit_s = limit_s
        self._on_expiry = on_expiry or self._end_process
        self._activities: list[Activity] = []  # innermost last
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, describe: Callable[[], str]) -> Iterator[Activity]:
        """Watch the body. `describe` gives the message; it is called only when the limit is passed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="epp-watchdog", daemon=True)
            self._thread.start()
        activity = Activity(describe)
        self._activities.append(activity)
        try:
            yield activity
        finally:
            self._activities.remove(activity)

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self.limit_s / 4))
            for activity in reversed(self._activities.copy()):
                if time.monotonic() - activity.since_s > self.limit_s:
                    activity.since_s = math.inf
                    self._on_expiry(activity.describe())

    @staticmethod
    def _end_process(message: str) -> None:
        try:
            logger.critical("%s", message)
            logging.shutdown()
            faulthandler.dump_traceback()  # where every thread of this process stands
        finally:
            os._exit(EXIT_CODE)
