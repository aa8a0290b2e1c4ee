"""Free list over pages of host memory."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Range of bytes of a page, ``[start, stop)``."""

    page: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class FreeSpans:
    """Free list: allocates in as few spans as possible and merges adjacent spans when memory is returned.

    An allocation need not be contiguous, so all free bytes can be allocated, whatever was allocated and returned before.

    Attributes:
        num_bytes: free bytes in all.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._spans: list[Span] = []  # in order, and no two of them touch

    def take(self, num_bytes: int) -> list[Span]:
        """Allocate `num_bytes` bytes, which must be free.

        They come from the smallest span that has room for all of them, else from the largest spans.
        """
        taken = []
        while num_bytes:
            roomy = [span for span in self._spans if span.num_bytes >= num_bytes]
            span = min(roomy, key=_size) if roomy else max(self._spans, key=_size)
            part = span._replace(stop=span.start + min(num_bytes, span.num_bytes))
            at = self._spans.index(span)
            self._spans[at : at + 1] = [span._replace(start=part.stop)] if part != span else []
            taken.append(part)
            num_bytes -= part.num_bytes
            self.num_bytes -= part.num_bytes
        return taken

    def add(self, spans: Iterable[Span]) -> None:
        """Return spans to the free list."""
        for span in spans:
            self.num_bytes += span.num_bytes
            at = bisect(self._spans, span)
            before, after = self._spans[max(at - 1, 0) : at], self._spans[at : at + 1]
            first, last = at, at
            if before and _touch(before[0], span):
                first, span = at - 1, span._replace(start=before[0].start)
            if after and _touch(span, after[0]):
                last, span = at + 1, span._replace(stop=after[0].stop)
            self._spans[first:last] = [span]


def _touch(span: Span, later: Span) -> bool:
    return span.page == later.page and span.stop == later.start


def _size(span: Span) -> int:
    return span.num_bytes
