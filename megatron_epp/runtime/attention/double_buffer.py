"""Two buffers: one is in use while what is used next arrives in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A group of heads of one layer."""

    layer: int
    part: int


class Use(NamedTuple):
    """So many of a piece's rows, from the first on."""

    piece: Piece
    num_rows: int


class LookAhead:
    """Says which of two buffers holds what is asked for, and has the other filled meanwhile.

    Args:
        expected: what will be asked for, in order. What comes unexpected is loaded when it is asked for.
        load: begins to fill a buffer, 0 or 1, and returns a mark to wait for.
    """

    def __init__(self, expected: Iterable[Use], load: Callable[[Use, int], Any]) -> None:
        self._expected = list(expected)[::-1]
        self._load = load
        self._current = 0
        self._held: Piece | None = None
        self._coming: tuple[Use, Any] | None = None

    def begin(self) -> None:
        """Begin to load what comes first, into the buffer that is used first."""
        if self._expected:
            self._current = 1
            self._fetch(self._expected[-1])

    def take(self, use: Use) -> tuple[int, Any]:
        """The buffer of what is asked for, and the mark to wait for before using it."""
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
