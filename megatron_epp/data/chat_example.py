"""One sample of a conversation as text, with what is trained marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.reading import printable

_MOST_PARTS, _MOST_LINES, _MOST_COLUMNS = 12, 8, 100
"""Most parts of a sample, lines of a part, and characters of a line that are shown whole."""


def example_lines(
    ids: NDArray[np.integer[Any]], trained: NDArray[np.uint8], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """Return the text of a sample, with a line break and a mark where the trained tokens begin and end.

    Line breaks of the text are written as ``\\n``, so that those without are of this page.

    Args:
        ids: integers [tokens].
        trained: [tokens], 1 for tokens that are trained.
    """
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    parts = [_part(decode(ids[start:end].tolist()), bool(trained[start])) for start, end in pairwise(edges) if start < end]
    return [
        line
        for part in _middle_out(parts, _MOST_PARTS, lambda count: [_line(f"... {count:,} parts ...", False)])
        for line in part
    ]


def _part(text: str, is_trained: bool) -> list[str]:
    lines = _middle_out(re.findall(r"[^\n]*\n|[^\n]+", text), _MOST_LINES, lambda count: f"... {count:,} lines ...")
    return [_line(line, is_trained) for line in lines]


def _line(text: str, is_trained: bool) -> str:
    text = printable(text)
    if len(text) > _MOST_COLUMNS:
        text = f"{text[: _MOST_COLUMNS // 2]} ... {text[-_MOST_COLUMNS // 4 :]}"
    return f"{'trained' * is_trained:>9} | {text}"


def _middle_out[T](items: list[T], most: int, left_out: Callable[[int], T]) -> list[T]:
    """Return items, of too many the first and the last ones, and between them how many are left out."""
    if len(items) <= most:
        return items
    last = most // 3
    return [*items[: most - last - 1], left_out(len(items) - most + 1), *items[-last:]]
