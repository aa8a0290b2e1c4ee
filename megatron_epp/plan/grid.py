"""Plans as text: one line per rank, ``rank 0 | 0F0 0F1 0B0 0B1``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from megatron_epp.plan.action import Action
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import AnyStep, Plan

GridRows = Sequence[Sequence[Action]]

_LINE = re.compile(r"(rank|copy) +(\d+) \|(.*)")


def to_grid(plan: Plan | GridRows) -> str:
    """Print a plan, or rows of actions (as `lower` returns them), one line per rank.

    A plan with offloads or loads gets a second block of lines, ``copy 0 | 0O1 0L1``, for the copies overlapped with compute.
    """
    if not isinstance(plan, Plan):
        return _block("rank", [map(str, row) for row in plan])
    grid = _block("rank", [map(step_text, steps) for steps in plan.ranks])
    if any(plan.copies):
        grid += _block("copy", [map(step_text, steps) for steps in plan.copies])
    return grid


def step_text(step: AnyStep) -> str:
    """Print the actions of a step: ``0F5``, or ``0F5+0B1`` for several that run together."""
    return "+".join(map(str, step.actions))


def from_grid(text: str, block: Literal["rank", "copy"] = "rank") -> tuple[tuple[Action, ...], ...]:
    """Read back the lines of one block of `to_grid`, in rank order. Blank lines are skipped, and actions that run in one step
    are read one after another.

    Raises `PlanError` if a line has another form, ranks are not numbered 0, 1, 2, ..., or a word is not an action.
    """
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise PlanError(f"line {number} of the grid is {line.strip()[:40]!r}; expected 'rank <n> | <actions>'")
        if match[1] != block:
            continue
        if int(match[2]) != len(rows):
            raise PlanError(f"line {number} of the grid is {block} {match[2]}; expected {block} {len(rows)}")
        rows.append(tuple(Action.parse(word) for word in match[3].replace("+", " ").split()))
    return tuple(rows)


def label(block: str, rank: int, num_ranks: int) -> str:
    """Head of a line, equally wide for every rank."""
    return f"{block} {rank:>{len(str(num_ranks - 1))}} |"


def _block(block: str, rows: Sequence[Iterable[str]]) -> str:
    lines = [" ".join([label(block, rank, len(rows)), *row]) for rank, row in enumerate(rows)]
    return "".join(line + "\n" for line in lines)
