"""Plain text tables and numbers with units, as the reports print them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan.plan import is_unlimited
from megatron_epp.plan.units import format_bytes


def format_cap(cap_bytes: int, *others: float) -> str:
    """Format a cap like `format_bytes`, or as ``unlimited`` for no cap."""
    return "unlimited" if is_unlimited(cap_bytes) else format_bytes(cap_bytes, *others)


def format_us(time_us: float) -> str:
    """Format microseconds as ``812.5 us``, ``12.35 ms`` or ``3.210 s``."""
    if time_us < 1e3:
        return f"{time_us:.1f} us"
    return f"{time_us / 1e3:.2f} ms" if time_us < 1e6 else f"{time_us / 1e6:.3f} s"


def clip(line: str, width: int | None) -> str:
    """Cut a line to `width` characters, the last of them ``…`` if text was cut."""
    return line if width is None or len(line) <= width else line[: max(width - 1, 0)] + "…"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table with aligned columns, two spaces apart.

    Args:
        header: name of each column.
        rows: cells, as many per row as the header has.
        left: columns that align left; the others hold numbers and align right.
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.ljust(w) if c in left else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return lines
