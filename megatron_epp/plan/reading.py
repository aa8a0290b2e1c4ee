"""Reading of untrusted files within limits, with errors of one line that name the file and the fault.

Every reader of JSON and YAML in this package goes through these functions: sizes, depths and numbers are bounded in one place.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from megatron_epp.plan.errors import EppError

MOST_BYTES = 1 << 28
"""Largest size of a file that is read as a whole."""
MOST_DEPTH = 100
"""Largest nesting depth of lists and objects."""
MOST_VALUES = 20_000
"""Largest number of values of a YAML file; a value that aliases repeat counts each time."""
MOST_NUMBER = 1e24
"""Largest number: of microseconds, bytes, or rates of them."""
MOST_WHOLE = (1 << 63) - 1
"""Largest whole number, the largest signed 64-bit integer."""
MOST_LAYERS = 10_000
"""Largest number of layers of a model."""
MOST_SIZE = (1 << 31) - 1
"""Largest width, vocabulary, or number of tokens, heads, experts or devices."""

_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|(-?Infinity|NaN|-?\d[\d.eE+-]*)')
"""Pattern of JSON's strings, and as a group of its numbers, `NaN` and infinities included, which are not JSON."""
_MOST_WORD = 400
"""Largest number of characters of a path or a word that an error quotes."""
_CONTAINERS = frozenset({dict, list, tuple, set})
_SHORT = reprlib.Repr(maxlevel=3, maxstring=60, maxother=60, maxlong=40)


@contextmanager
def naming_file(path: str | os.PathLike[str], kind: type[EppError] = EppError) -> Iterator[None]:
    """Put a file's name in front of every error of its contents, and note it on unforeseen ones.

    An error of type `kind` is raised in place of an `EppError`, `OSError` or `UnicodeDecodeError`.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise kind(f"{path}: {error}; a text file is expected") from error
    except EppError as error:
        raise kind(f"{path}: {error.message}", *error.remedies).with_context(after=error.after) from error
    except Exception as error:
        error.add_note(f"the file at hand was {path}")
        raise


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Read the text of a file. Raises `EppError` if it is larger than the limit, OSError, or UnicodeDecodeError."""
    with open(path, "rb") as stream:
        raw = stream.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise EppError(f"the file is larger than {most_bytes:,} bytes, the most that is read")
    return raw.decode("utf-8")


def parse_json(text: str | bytes, what: str, *, with_nan: bool = False) -> Any:
    """Read JSON, with `with_nan` also NaN and Infinity. Raises `EppError` if it is malformed, or deeper than `MOST_DEPTH`."""
    if not text.strip():
        raise EppError(f"{what} is empty")
    try:
        value = json.loads(text, parse_constant=None if with_nan else _no_constant)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        where = "" if isinstance(error, json.JSONDecodeError) else infinite_at(text)
        raise EppError(f"{what} is not JSON: {one_line(error)}{where}") from None
    check_nested(value, what)
    return value


def check_nested(value: Any, what: str, most_values: int | None = None) -> None:
    """Raise `EppError` if lists and objects are nested too deep, or hold too many values; repeated ones count each time."""
    level, count = [value], 0
    for _ in range(MOST_DEPTH + 1):
        deeper: list[Any] = []
        for outer in level:
            inner = outer.values() if isinstance(outer, dict) else outer if type(outer) in _CONTAINERS else ()
            count += len(inner)
            if most_values is not None and count > most_values:
                raise EppError(f"{what} holds more than {most_values:,} values, those that aliases repeat counted each time")
            deeper += [entry for entry in inner if type(entry) in _CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise _too_deep(what)


def brief(value: Any) -> str:
    """Format a value in few characters, for an error."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        return f"a {type(value).__name__} too long to print"


def brief_text(value: Any) -> str:
    """Format a value as `brief` does, but short text without quotes."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= _SHORT.maxstring else brief(value)


def printable(text: str) -> str:
    """Escape characters of untrusted text that would move a terminal's cursor or cannot be encoded; the result is one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def one_line(error: BaseException) -> str:
    """Format the error of a library, which may quote the file, as one printable line; long words that it quotes are cut."""
    return printable(" ".join(map(_cut, str(error).split())))


def _cut(word: str) -> str:
    return word if len(word) <= _MOST_WORD else word[:_MOST_WORD] + "..."


def nearest(name: str, known: Iterable[str], words: str = "did you mean {!r}?") -> str:
    """Return ``; did you mean 'num_layers'?`` for a misspelt name, or an empty text if no known name is similar."""
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; {words.format(similar[0])}" if similar else ""


def nearest_number(text: str) -> str:
    """Return ``; did you mean 8192?`` for a number with a unit, as in ``8k``, ``2M`` and ``80GB``, or an empty text."""
    match = re.fullmatch(r"(\d{1,6})\s*(k|M|g|Gi?B)", text, re.IGNORECASE)
    if match is None:
        return ""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(match[2].lower(), 1)
    return f"; did you mean {int(match[1]) * factor}?"


def missing_file(name: str) -> str:
    shown_as = printable(_cut(name))
    return f"{shown_as} is a folder, not a file" if os.path.isdir(name) else f"there is no file {shown_as}"


def number(value: Any, least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> float:
    """Return a finite number as float. Raises `EppError` for any other value, or one outside the limits."""
    if type(value) not in (int, float):
        raise EppError(f"{brief(value)} is not a number")
    if not least <= value <= most:
        raise EppError(f"{brief(value)} is not a number from {least:g} to {most:g}")
    return float(value)


def whole(value: Any, least: int = -MOST_WHOLE, most: int = MOST_WHOLE) -> int:
    """Return a whole number. Raises `EppError` for any other value, or one outside the limits."""
    if type(value) is not int:
        raise EppError(f"{brief(value)} is not a whole number")
    if not least <= value <= most:
        raise EppError(f"{brief(value)} is not a whole number from {least:,} to {most:,}")
    return value


def of_type[T](kind: type[T], value: Any, words: str) -> T:
    """Return a value of a type. Raises `EppError` with the type's `words`, as in "is not text", for any other."""
    if not isinstance(value, kind):
        raise EppError(f"{brief(value)} is not {words}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is infinite or not a number, which JSON has no word for")


def infinite_at(text: str | bytes) -> str:
    """Return ": line 3 column 7", where the first number of a JSON text stands that no float holds; empty if all do."""
    text = text if isinstance(text, str) else text.decode("utf-8", "replace")
    start = next((match.start() for match in _NUMBER.finditer(text) if match[1] and not _is_finite(match[1])), None)
    if start is None:
        return ""
    return f": line {1 + text.count(chr(10), 0, start)} column {start - text.rfind(chr(10), 0, start)}"


def _is_finite(number: str) -> bool:
    try:
        return math.isfinite(float(number))
    except ValueError:  # no number at all, which the parser says itself
        return True


def _too_deep(what: str) -> EppError:
    return EppError(f"{what} has lists or objects nested deeper than {MOST_DEPTH}, or one that contains itself")
