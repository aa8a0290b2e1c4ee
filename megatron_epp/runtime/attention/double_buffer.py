"""Double buffer: one buffer is in use while the next piece is loaded into the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A group of heads of one layer."""

    layer: int
    part: int


class Use(NamedTuple):
    """Request for the first `num_rows` rows of a piece."""

    piece: Piece
    num_rows: int


class LookAhead:
    """Prefetches the next piece into one of two buffers, and returns the buffer that holds the requested piece.

    Args:
        expected: the requests to come, in order. A request that is not among them is loaded when it is made.
        load: begins to fill a buffer, 0 or 1, and returns a mark to wait for.
    """

    def __init__(self, expected: Iterable[Use], load: Callable[[Use, int], Any]) -> None:
        self._expected = list(expected)[::-1]
        self._load = load
        self._current = 0
        self._held: Piece | None = None
        self._coming: tuple[Use, Any] | None = None

    def begin(self) -> None:
        """Begin to load the first expected request, into the buffer that is used first."""
        if self._expected:
            self._current = 1
            self._fetch(self._expected[-1])

    def take(self, use: Use) -> tuple[int, Any]:
        """Return the number of the buffer that holds a request, and the mark to wait for before using it."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == use:
            self._current, mark = 1 - self._current, coming[1]
        elif self._held == use.piece:
            mark = None  # it was just used
        else:
            mark = self._load(use, self._current)
        self._held = use.piece
        if use in self._expected:
            while self._expected.pop() != use:
                pass
            if self._expected and self._expected[-1].piece != use.piece:
                self._fetch(self._expected[-1])
        return self._current, mark

    def _fetch(self, use: Use) -> None:
        self._coming = (use, self._load(use, 1 - self._current))
