"""Errors for users: one or two lines with the numbers, and the settings to change as data.

Planning knows settings by their fields (`Options.chunk_tokens`), not by flags: who asked may have used Python or a command
line. Each front end renders an error with its own names (`EppError.text`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Self

from megatron_epp.plan.units import enough_gib

type Names = Mapping[str, str]
"""The name of each setting for who asked, empty for one that they cannot change. One that is missing is called by its field."""


def as_setting(name: str, value: object) -> str:
    """Format a setting with its value, as a flag or as an assignment in Python."""
    return f"{name} {value}" if name.startswith("--") else f"{name}={value!r}"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of one setting that helps."""

    # What to do with it; "use" for words of the value alone
    change: Literal["raise", "lower", "change", "set", "add", "drop", "use"]
    setting: str = ""  # field of `Problem`, `Options` or `ModelShape`, or a flag of Megatron with underscores
    value: int | str | None = None  # a value that helps, in the field's unit; None where any change in this direction may help

    @property
    def verb(self) -> str:
        return "leave out" if self.change == "drop" else self.change

    def object(self, names: Names) -> str:
        """Format setting and value. Bytes become GiB where the name has GB as its unit, rounded up so that they suffice."""
        name = names.get(self.setting, self.setting)
        if self.value is None:
            return name
        in_gib = isinstance(self.value, int) and self.setting.endswith("_bytes") and name.endswith("gb")
        value = enough_gib(int(self.value)) if in_gib else str(self.value)
        return f"{name} to {value}" if name else value


class EppError(Exception):
    """Base of every error this package raises on purpose. The command line prints it without a traceback.

    Errors cross processes: pickling keeps everything.

    Attributes:
        message: what is wrong; ends with a line break where the remedies are a sentence of their own.
        remedies: alternatives, each of which may help.
        after: lines below both, as `with_context` adds them.
        names: of the settings, for `str`; empty where they are called by their fields.
        exit_code: of a process that it ends.
    """

    exit_code = 1

    def __init__(self, message: str, *remedies: Remedy) -> None:
        super().__init__(message, *remedies)
        self.message, self.remedies, self.after = message, remedies, ""
        self.names: Names = {}

    def __str__(self) -> str:
        return self.text(self.names)

    def __reduce__(self) -> tuple[Callable[..., EppError], tuple[Any, ...]]:
        return _restored, (type(self), self.args, self.__dict__)

    def text(self, names: Names) -> str:
        remedies = tuple(remedy for remedy in self.remedies if names.get(remedy.setting, "its field"))
        if not remedies:
            return (self.message.rstrip("\n") if self.remedies else self.message) + self.after
        advice = ", or ".join(_phrases(remedies, names))
        if self.message.endswith("\n"):
            return f"{self.message}{advice[0].upper()}{advice[1:]}.{self.after}"
        return f"{self.message}; {advice}{self.after}"

    def without_remedies(self, *settings: str) -> Self:
        """Return a copy that does not advise to change these settings: the same type and attributes."""
        error = copy.copy(self)
        error.remedies = tuple(remedy for remedy in self.remedies if remedy.setting not in settings)
        if error.message.endswith("\n") and not error.remedies:
            error.message = error.message.rstrip("\n")
        return error

    def with_context(self, before: str = "", after: str = "", names: Names | None = None) -> Self:
        """Return a copy, of the same type, with text around its message and remedies; `str` uses `names`, if given."""
        error = copy.copy(self)
        error.message, error.after = before + self.message, self.after + after
        error.names = self.names if names is None else names
        return error


class NothingLeftError(EppError):
    """A training was started that its checkpoint says is over. A scheduler need not start it again."""

    exit_code = 3


class PlanError(EppError):
    """A plan, or its text or JSON form, is malformed."""


class InfeasibleError(EppError):
    """No plan fits the limits; `least_cap_bytes` is the smallest memory cap that suffices, 0 if another limit is the reason."""

    def __init__(self, message: str, *remedies: Remedy, least_cap_bytes: int = 0) -> None:
        super().__init__(message, *remedies)
        self.least_cap_bytes = least_cap_bytes


def reason_of(error: Exception) -> str:
    """Return the text of an error, with its type if it is not of this package: `KeyError` alone has a text that says little."""
    return str(error) if isinstance(error, EppError) else f"{type(error).__name__}: {error}"


def _restored(kind: type[EppError], args: tuple[Any, ...], state: dict[str, Any]) -> EppError:
    """Rebuild an error without its constructor, whose parameters differ between types."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _phrases(remedies: tuple[Remedy, ...], names: Names) -> Iterator[str]:
    """Say each verb once, in front of all its objects."""
    for verb, group in groupby(remedies, key=lambda remedy: remedy.verb):
        *others, last = (remedy.object(names) for remedy in group)
        yield f"{verb} {', '.join(others)} or {last}" if others else f"{verb} {last}"
