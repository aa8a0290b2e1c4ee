"""Redirection of what a solver's C library prints, out of a command's output, which may be JSON."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send what C code of this process prints to stdout in the body to stderr.

    It is for the call of a solver alone: what other libraries and users print stays where it belongs. Without stdout, nothing
    is changed.
    """
    libc = ctypes.CDLL(None)
    try:
        stdout = os.dup(1)
    except OSError:  # closed
        yield
        return
    sys.stdout.flush()
    libc.fflush(None)  # what C code has printed before, which its buffer still holds
    try:
        with suppress(OSError):  # without stderr, it stays
            os.dup2(2, 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
