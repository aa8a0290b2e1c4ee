"""A flag as data, and the values of flags as argparse reads them: each is refused in words that say what would do."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_epp.plan.flags import AUTO, flag_of
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.reading import MOST_LAYERS, MOST_SIZE, brief, nearest, nearest_number

MOST_SEQUENCES = 1 << 24  # largest number of sequences in a batch
SWITCH = bool  # type of a flag that takes no value
GIVEN = "given"  # value of --epp-order with which microbatches run in the caller's order


@dataclass(frozen=True, slots=True)
class Number:
    """Reads a number within limits."""

    least: int
    most: float
    kind: type[int] | type[float] = int
    is_above: bool = False  # `least` itself is too small
    of_what: str = ""  # takes the word ``auto`` too, and counts this

    def __call__(self, text: str) -> int | float | str:
        if self.of_what and text == AUTO:
            return text
        try:
            value = self.kind(text) if self.kind is float or (text.isdecimal() and len(text) < 16) else math.nan
        except ValueError:
            value = math.nan
        if not self.holds(value):
            raise argparse.ArgumentTypeError(f"{brief(text)} is not {self.must_be}{nearest_number(text)}")
        return value

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.is_above and value == self.least)

    def accepts(self, value: float | str) -> bool:
        """Return True for a number within the limits, or for the text of a value that `__call__` takes."""
        if not isinstance(value, str):
            return self.holds(value)
        try:
            self(value)
        except argparse.ArgumentTypeError:
            return False
        return True

    @property
    def must_be(self) -> str:
        if self.of_what:
            return f"auto or a number of {self.of_what}, up to {self.most:,}"
        if self.is_above:
            return f"a positive number up to {self.most:,.0f}"
        kind = "a whole number from" if self.kind is int else "a share,"
        return f"{kind} {self.least} to {self.most:,}"


COUNT = Number(1, MOST_SIZE)
WHOLE = Number(0, MOST_SIZE)
SEED = Number(0, (1 << 32) - 1)
LAYERS = Number(1, MOST_LAYERS)
STAGES = Number(1, 4096)
DEVICES = Number(1, 1 << 20)
SEQUENCES = Number(1, MOST_SEQUENCES)
AMOUNT = Number(0, 1e9, float, is_above=True)  # a size in GB, a time in seconds, or a scale
SHARE = Number(0, 1, float)
RECOMPUTED = Number(0, MOST_LAYERS, of_what="layers")
BLOCK = Number(0, MOST_SIZE, of_what="tokens, 0 for no blocks")


def planner(text: str) -> str:
    if ":" not in text and text not in PLANNERS:
        none = f"{brief(text)} is none of {', '.join(sorted(PLANNERS))}, and no module:function"
        raise argparse.ArgumentTypeError(none + nearest(text, PLANNERS))
    return text


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting, and its flags."""

    setting: str  # name in errors, and destination: a field of `Options`, `Problem` or `ModelShape`, else the flag's own name
    training: str = ""  # flag of a training run: ``--epp...`` is ours, any other Megatron's own; empty for none
    short: str = ""  # flags of the command line, with spaces between; it takes the one of training too. Empty for none.
    # Type of the value; `SWITCH` for a flag without one. Training checks the limits of a `Number` with all else.
    read: Callable[[str], Any] = str
    help: str = ""  # what it does, for training; the command line says it in lower case. Settings in braces become flags.
    short_help: str = ""  # for the command line, where that differs
    default: Any = None
    choices: tuple[str, ...] = ()  # all values; empty where they are not listed
    metavar: str | None = None  # the value in help texts, or its unit; N for whole numbers by default
    alone: str | None = None  # value where the flag is given without one; None where it needs one
    takes_several: bool = False
    field: Callable[[Any], Any] = lambda value: value  # converts a parsed value to the field's

    def described(self, help: str, short_help: str = "") -> Flag:
        return replace(self, help=help, short_help=short_help)

    @staticmethod
    def ours(setting: str, help: str, read: Callable[[str], Any], **more: Any) -> Flag:
        """Return a flag that is of a training run alone, named as its setting."""
        return Flag(setting, f"--epp-{setting.replace('_', '-')}", "", read, help, **more)

    @staticmethod
    def same(setting: str, help: str, read: Callable[[str], Any] = str, **more: Any) -> Flag:
        """Return a flag of Megatron's that commands have by the same name, which is that of its setting."""
        return Flag(setting, name := flag_of(setting), name, read, help, **more)

    @property
    def unit(self) -> str | None:
        return "N" if self.metavar is None and isinstance(self.read, Number) and self.read.kind is int else self.metavar

    @property
    def is_switch(self) -> bool:
        return self.read is SWITCH

    @property
    def unset(self) -> object:
        """Value in the arguments of a training run where the flag is not given."""
        return False if self.is_switch else self.default

    @property
    def is_ours(self) -> bool:
        """True for a flag that this package adds to a training run."""
        return self.training.startswith("--epp")

    @property
    def dest(self) -> str:
        """Name in the arguments of a training run."""
        return self.training.removeprefix("--").replace("-", "_")

    @property
    def short_dest(self) -> str:
        """Name in the arguments of a command."""
        return self.short.split(" ")[0].removeprefix("--").replace("-", "_")
