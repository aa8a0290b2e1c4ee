"""Which bytes of the pages at the host nobody has."""

from __future__ import annotations

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
        joined: list[Span] = []
        for span in sorted((*self._spans, *spans)):
            if joined and joined[-1][:1] == span[:1] and joined[-1].stop == span.start:
                joined[-1] = joined[-1]._replace(stop=span.stop)
            else:
                joined.append(span)
        self._spans, self.num_bytes = joined, sum(map(_size, joined))


def _size(span: Span) -> int:
    return span.num_bytes
