"""Values of the command line as argparse reads them: each is refused in words that say what would do."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_epp.cost.head import AUTO
from megatron_epp.planner import PLANNERS

PICTURES = (".png", ".svg", ".pdf")


def count(text: str) -> int:
    """A whole number from 1."""
    if not (text.isdecimal() and len(text) < 16 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def planner(text: str) -> str:
    """A planner's name."""
    if ":" not in text and text not in PLANNERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(sorted(PLANNERS))}, and no module:function")
    return text


def whole(text: str) -> int:
    """A whole number from 0."""
    if not (text.isdecimal() and len(text) < 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, 0 to 1")
    return value


def positive_number(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
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
    """What keeps a file from being written, told before anything is computed; empty where nothing does."""
    if path.is_dir():
        return f"{path} is a folder: give a file in it"
    return "" if path.parent.is_dir() else f"{path}: there is no folder {path.parent}; make it first"
