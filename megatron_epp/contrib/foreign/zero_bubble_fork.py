"""Schedules that the zero-bubble fork of Megatron prints: a line of words for every rank.

A word is an operation and a microbatch. In lines with communication, ``f0 sf0 b0 w0``, lower case is a rank's first stage and
upper case its second; b is the whole backward unless there is a w of it; words that all come equally often are slices, the last
of which runs backward first. In lines without, ``F0 BW0``, ``F0.1`` is of the rank's second stage, ``F0-1`` of the microbatch's
second slice, and BW the whole backward; but with ``B0-1 W0-1``, two parts, ``F0-1`` is of the rank's second stage. Lines
before and after the table are skipped. Communication (SF, RF, SB, RB), steps of the optimizer's validation (PV, RPV, SPV),
copies (OSS, OSE, ORP, ORS, ORE, OB) and recompute (R) are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_epp.contrib.foreign.pass_rows import Pass, placed
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import brief

SOURCE = "zero-bubble"
_COMPUTE = {"F", "B", "W", "BW"}
_OTHER = {"SF", "RF", "SB", "RB", "PV", "RPV", "SPV", "OSS", "OSE", "ORP", "ORS", "ORE", "OB", "R"}
_WORD = re.compile(r"([A-Za-z]{1,3})(\d{1,9})(?:([.-])(\d{1,9}))?", re.ASCII)


class _Word(NamedTuple):
    """A word of a row; `stage` is of the rank."""

    name: str
    stage: int
    microbatch: int
    part: int


@dataclass(frozen=True, slots=True)
class _Writing:
    """Tells how words are written."""

    has_case: bool  # their case is the stage
    has_parts: bool  # ``-1`` is the second slice, not the second stage


def is_table(text: str) -> bool:
    """Return True if a line has such words alone."""
    return any(words and all(map(_is_word, words)) for words in map(str.split, text.splitlines()))


def from_zero_bubble(text: str) -> Plan:
    """Read a table as a plan. Takes and raises what `foreign.from_table` does."""
    lines = _rows_of(text)
    words = {match[0] for line in lines for word in line if (match := _WORD.fullmatch(word))}
    has_parts = not any("-" in word and word[0] in "BW" and word[:2] != "BW" for word in words)
    writing = _Writing(any(word != word.upper() for word in words), has_parts)
    rows = [[_read(word, number, at, writing) for at, word in enumerate(line)] for number, line in enumerate(lines)]
    rows = [[word for word in row if word.name in _COMPUTE] for row in rows]
    often = {count for row in rows for count in Counter(row).values()}
    if len(often) == 1 and (num_slices := often.pop()) > 1:
        rows = [_numbered(row, num_slices) for row in rows]
    parts = 1 + max((word.part for row in rows for word in row), default=0)
    return placed(list(map(_passes, rows)), SOURCE, parts)


def _rows_of(text: str) -> list[list[str]]:
    """Return the words of all lines from the first to the last of which half are passes. Empty lines are left out."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    at = [number for number, line in enumerate(lines) if 2 * sum(map(_is_word, line)) >= len(line)]
    return lines[at[0] : at[-1] + 1] if at else []


def _is_word(word: str) -> bool:
    match = _WORD.fullmatch(word)
    return match is not None and match[1].upper() in _COMPUTE | _OTHER


def _read(word: str, row: int, at: int, writing: _Writing) -> _Word:
    match = _WORD.fullmatch(word)
    if match is None or (name := match[1].upper()) not in _COMPUTE | _OTHER or match[1] not in (name, name.lower()):
        raise PlanError(f"row {row + 1}, word {at + 1} of the table is {brief(word[:40])}; expected a pass such as f3")
    is_part = match[3] == "-" and writing.has_parts
    stage = int(match[4]) if match[3] and not is_part else int(writing.has_case and match[1] == name)
    return _Word(name, stage, int(match[2]), int(match[4]) if is_part else 0)


def _numbered(row: Sequence[_Word], num_slices: int) -> list[_Word]:
    """Number the slices of words that have no number: forwards rise, and the others fall."""
    seen, numbered = Counter[_Word](), []
    for word in row:
        numbered.append(word._replace(part=seen[word] if word.name == "F" else num_slices - 1 - seen[word]))
        seen[word] += 1
    return numbered


def _passes(row: Sequence[_Word]) -> list[tuple[Pass, ...]]:
    """Return the steps of a rank. B is the whole backward where there is no W of it."""
    split, steps = {word[1:] for word in row if word.name == "W"}, list[tuple[Pass, ...]]()
    for word in row:
        is_part = word.name == "B" and word[1:] in split
        steps.append((Pass("B" if word.name == "BW" else "I" if is_part else word.name, *word[1:]),))
    return steps
