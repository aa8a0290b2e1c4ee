"""Short form of a run's output for the terminal, and all of it in a file.

Megatron prints about a thousand lines before the first iteration. The launcher passes on this package's lines, lines about
iterations and checkpoints, warnings and errors; on a failure it shows the end of the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

LOG_VARIABLE = "EPP_LOG_FILE"  # environment variable with the path of the file; without it everything is printed as it comes
_TAIL_LINES = 40
_WAIT_S = 5.0  # seconds to wait for the last lines at the end, which a process that outlives the run may hold back
_SHOWN = re.compile(
    rb"megatron[-_]epp|\bepp (iteration|memory|hint|run)\b|(?<!consumed )\biteration +\d+ */ *\d+|validation loss"
    rb"|exiting program|no GPU found"
    rb"|^(\[rank\d+\]:? ?)?(WARNING|ERROR|CRITICAL|Error|FATAL)\b"
    rb"|\b(saving|saved|loading|loaded) (a )?checkpoint|could not find the metadata file"
)
"""Pattern of the lines that are shown."""
_HIDDEN = re.compile(
    rb"\.py:\d+: \w*Warning: |one_logger package is required|Result validation enabled|RerunStateMachine initialized"
    rb"|GPTModel IS DEPRECATED|^INFO:megatron\.|patched megatron|  File \""
)
"""Pattern of lines among these that say nothing to a user: warnings of imports, and what Megatron tells its developers."""


def is_shown(line: bytes) -> bool:
    return _SHOWN.search(line) is not None and _HIDDEN.search(line) is None


class ShortLog:
    """Appends all output to a file, and shows the short form on the terminal."""

    def __init__(self, path: Path, terminal: int) -> None:
        self.path = path
        self._terminal = terminal
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def read(self, source: int) -> None:
        """Read output until all its writers have ended: all of it goes to the file, the short form to the terminal."""
        unended_line = b""
        with open(self.path, "ab", buffering=0) as file, open(source, "rb", buffering=0) as output:
            while chunk := output.read(1 << 16):
                file.write(chunk)
                *lines, unended_line = (unended_line + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
        if unended_line:
            self._take(unended_line)

    def _take(self, line: bytes) -> None:
        self._tail.append(line)
        if is_shown(line):
            with contextlib.suppress(OSError):  # a terminal that is closed ends no training
                os.write(self._terminal, line + b"\n")

    def tail(self) -> str:
        """Return the last lines of the output, with the path of the file."""
        text = b"\n".join(self._tail).decode("utf-8", errors="replace")
        return f"--- the last lines of {self.path} ---\n{text}\n--- all of it is in {self.path} ---\n"


@contextlib.contextmanager
def divided(path: str | None) -> Iterator[ShortLog | None]:
    """Send what this process and its children print in the body to a file, if any, and the short form to the terminal."""
    if path is None:
        yield None
        return
    open(path, "ab").close()
    os.environ["PYTHONUNBUFFERED"] = "1"  # in a pipe, lines of the ranks would wait for a full buffer
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    source, sink = os.pipe()
    log = ShortLog(Path(path), saved[0])
    reader = threading.Thread(target=log.read, args=(source,), name="short log", daemon=True)
    reader.start()
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    try:
        yield log
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        reader.join(_WAIT_S)
