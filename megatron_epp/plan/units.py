"""Bytes as text: with a unit, and with digits enough to tell sizes apart that stand side by side."""

from __future__ import annotations

import math

_GIB = 2**30
_BINARY = ((_GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_DECIMALS = range(2, 10)
"""Numbers of decimals that are tried: a byte shows in the ninth of a GiB."""


def byte_unit(largest: float) -> tuple[int, str]:
    """Return a suitable unit for a column whose largest entry is `largest` bytes: ``(bytes in it, name)``."""
    return next((unit for unit in _BINARY if largest >= unit[0]), _BINARY[-1])


def format_bytes(num_bytes: float, *others: float) -> str:
    """Format bytes as ``1.50 GiB``, with more decimals where it would look like another size of `others`."""
    for decimals in _DECIMALS:
        units = ((size, *byte_unit(size)) for size in (num_bytes, *others))
        texts = {size: f"{size / unit:.{decimals}f} {name}" for size, unit, name in units}
        if len(set(texts.values())) == len(texts):
            break
    return texts[num_bytes]


def format_gib(num_bytes: int, *others: int, decimals: int = 2) -> str:
    return f"{enough_gib(num_bytes, *others, decimals=decimals)} GiB"


def enough_gib(num_bytes: int, *others: int, decimals: int = 2) -> str:
    """Format bytes as a number of GiB, rounded up so that a limit raised to this number suffices.

    Its text differs from those of `others`, unless they are equal; small sizes have three significant digits.
    """
    sizes = {num_bytes, *others}
    least = min((size for size in sizes if size > 0), default=_GIB) / _GIB
    for count in range(max(decimals, 2 - math.floor(math.log10(1.001 * least))), max(_DECIMALS) + 1):
        if len({-(-size * 10**count // _GIB) for size in sizes}) == len(sizes):
            break
    else:
        count = max(_DECIMALS)
    return f"{-(-num_bytes * 10**count // _GIB) / 10**count:.{count}f}"
