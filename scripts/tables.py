"""Tables in Markdown, and pages of the documentation whose tables scripts compute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_TABLE = re.compile(r"(?m)(?:^\|.*\n)+")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as a table, whole numbers with commas."""
    lines = [titles, ["---"] * len(titles), *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def with_tables(page: str, tables: Iterable[str]) -> str:
    """Put tables into a page, each in place of the one with its titles. Raises ValueError unless there is one."""
    by_titles = {text.partition("\n")[0]: text for text in tables}
    there = [match[0].partition("\n")[0] for match in _TABLE.finditer(page)]
    if missing := [titles for titles in by_titles if there.count(titles) != 1]:
        raise ValueError(f"the page has not one table with the titles {missing[0]}")

    def current(match: re.Match[str]) -> str:
        text = by_titles.get(match[0].partition("\n")[0])
        return match[0] if text is None else f"{text}\n"

    return _TABLE.sub(current, page)
