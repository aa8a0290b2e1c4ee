"""A line on stderr while something takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_epp.report.table import printable

PATIENCE_S = 2.0
"""Seconds before the first progress line: shorter work prints nothing."""
_TERMINAL_EVERY_S, _LOG_EVERY_S = 0.5, 30.0


@contextmanager
def progress(what: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Say what is going on, and for how long, when the body takes more than two seconds.

    Args:
        what: is going on.
        detail: how far it has got; asked each time the line is written.
    """
    done = threading.Event()
    thread = threading.Thread(target=_report, args=(what, detail, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _report(what: str, detail: Callable[[], str], done: threading.Event) -> None:
    start, terminal, said = time.monotonic(), sys.stderr.isatty(), False
    wait_s = PATIENCE_S
    while not done.wait(wait_s):
        parts = [what, f"{time.monotonic() - start:.0f} s", *filter(None, [detail()])]
        sys.stderr.write(("\r\033[K" if terminal else "") + printable(", ".join(parts)) + ("" if terminal else "\n"))
        sys.stderr.flush()
        said, wait_s = True, _TERMINAL_EVERY_S if terminal else _LOG_EVERY_S
    if said and terminal:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
