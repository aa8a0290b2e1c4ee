"""Which bytes of the pages at the host nobody has."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes of a page, from one up to another."""

    page: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class FreeSpans:
    """Memory that is free, handed out in as few spans as there are for it and joined again when it comes back.

    It does not have to lie together, so as much can be handed out as is free, whatever was taken and given back before.

    Attributes:
        num_bytes: free in all.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._spans: list[Span] = []  # in order, and no two of them touch

    def take(self, num_bytes: int) -> list[Span]:
        """So many bytes, of which there must be as many: of the smallest span with room for all, or from the largest down."""
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
        """More is free."""
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
