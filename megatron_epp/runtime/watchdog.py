"""Ends a run that hangs, saying what it was waiting for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EXIT_CODE = 70


class Watchdog:
    """A thread that watches one activity at a time and ends the process when it outlasts a limit.

    A collective or receive that never completes blocks in native code, where no exception can reach it; ending the process is
    what lets the launcher end the others.

    Args:
        limit_s: seconds one activity may take.
        on_expiry: called with the message instead of ending the process (for tests).
    """

    def __init__(self, limit_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        self.limit_s = limit_s
        self._on_expiry = on_expiry or self._end_process
        self._current: tuple[float, Callable[[], str]] | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, describe: Callable[[], str]) -> Iterator[None]:
        """Watch the body. `describe` gives the message; it is called only when the limit is passed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="epp-watchdog", daemon=True)
            self._thread.start()
        self._current = (time.monotonic(), describe)
        try:
            yield
        finally:
            self._current = None

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self.limit_s / 4))
            current = self._current
            if current is not None and time.monotonic() - current[0] > self.limit_s:
                self._current = None
                self._on_expiry(current[1]())

    @staticmethod
    def _end_process(message: str) -> None:
        logger.critical("%s", message)
        logging.shutdown()
        os._exit(EXIT_CODE)
