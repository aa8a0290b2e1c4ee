"""Streams of the copies of a rank to and from host memory: one for each direction, so that both use the link at once.

An offload and a load that touch the same memory must be ordered by marks: only copies of one direction run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Mark = Any
"""Position on a stream, behind the last copy issued to it; None where copies run at once."""


class CopyStreams:
    """Streams of offloads and of loads, made by `cuda`: `torch.cuda`, or the like; None for a CPU, whose copies run at once."""

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._offloads: Any = None if cuda is None else cuda.Stream()
        self._loads: Any = None if cuda is None else cuda.Stream()

    @contextmanager
    def copying(self, out: bool, *after: Mark) -> Iterator[None]:
        """Run copies in the body on the stream of offloads (`out`) or of loads, behind all compute issued before."""
        stream = self._stream(out)
        if stream is None:
            yield
            return
        # Compute issued before has written what is offloaded, and has read what was in the memory that is loaded into.
        stream.wait_stream(self._cuda.current_stream())
        self.order(out, *after)
        with self._cuda.stream(stream):
            yield

    def order(self, out: bool, *after: Mark) -> None:
        for mark in after:
            if mark is not None:
                self._stream(out).wait_event(mark)

    def mark(self, out: bool) -> Mark:
        """Return the position behind the offloads, or loads, issued so far."""
        stream = self._stream(out)
        return None if stream is None else stream.record_event()

    def wait(self, *marks: Mark) -> None:
        """Make the compute stream, not the host, wait for marks."""
        for mark in marks:
            if mark is not None:
                self._cuda.current_stream().wait_event(mark)

    def _stream(self, out: bool) -> Any:
        return self._offloads if out else self._loads
