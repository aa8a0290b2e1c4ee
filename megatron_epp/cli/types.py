"""Values of the command line as argparse reads them: each is refused in words that say what would do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_epp.cost.head import AUTO
from megatron_epp.plan.reading import MOST_LAYERS, shown
from megatron_epp.planner import PLANNERS

PICTURES = (".png", ".svg", ".pdf")


MOST = (1 << 31) - 1
"""Largest whole number of a flag, where nothing smaller makes sense."""
MOST_STAGES = 4096
MOST_DEVICES = 1 << 20
MOST_SEQUENCES = 1 << 24
"""Largest number of sequences in a batch."""
MOST_SEED = (1 << 32) - 1
MOST_AMOUNT = 1e9
"""Largest size in GB, time in seconds or scale."""


def from_to(least: int, most: int) -> Callable[[str], int]:
    """A type of whole numbers.

    Args:
        least, most: of them.
    """

    def read(text: str) -> int:
        if not (text.isdecimal() and len(text) < 16 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {least} to {most:,}")
        return int(text)

    return read


count = from_to(1, MOST)
whole = from_to(0, MOST)
seed = from_to(0, MOST_SEED)
layers = from_to(1, MOST_LAYERS)
stages = from_to(1, MOST_STAGES)
devices = from_to(1, MOST_DEVICES)
sequences = from_to(1, MOST_SEQUENCES)


def planner(text: str) -> str:
    """A planner's name."""
    if ":" not in text and text not in PLANNERS:
        raise argparse.ArgumentTypeError(f"{shown(text)} is none of {', '.join(sorted(PLANNERS))}, and no module:function")
    return text


def blocks(text: str) -> str | int:
    """``auto``, or a whole number from 0."""
    return text if text == AUTO else whole(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a share, 0 to 1")
    return value


def positive_number(text: str) -> float:
    """A number above 0, up to `MOST_AMOUNT`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_AMOUNT:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive number up to {MOST_AMOUNT:,.0f}")
    return value


def output(text: str) -> str:
    """A file to write. `unwritable` looks whether it can be."""
    return text


def picture(text: str) -> str:
    """A picture to write."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: a picture's name ends in {', '.join(PICTURES)}")
    return text


def unwritable(path: Path) -> str:
    """Return why a file cannot be written, known before anything is computed; empty if it can."""
    if path.is_dir():
        return f"{path} is a folder: give a file in it"
    return "" if path.parent.is_dir() else f"{path}: there is no folder {path.parent}; make it first"
