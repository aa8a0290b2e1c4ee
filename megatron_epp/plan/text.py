"""Plans as text: one line per rank, ``rank 0 | 0F0 0F1 0B0 0B1``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from megatron_epp.plan.action import Action
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Plan

Rows = Sequence[Sequence[Action]]

_LINE = re.compile(r"(rank|copy) +(\d+) \|(.*)")


def to_grid(plan: Plan | Rows) -> str:
    """Print a plan, or rows of actions such as those of `lower`, one line per rank.

    A plan with offloads or loads gets a second block of lines, ``copy 0 | 0O1 0L1``, for the copies overlapped with compute.
    """
    if not isinstance(plan, Plan):
        return _block("rank", plan)
    grid = _block("rank", [plan.actions(rank) for rank in range(plan.num_ranks)])
    if any(plan.copies):
        grid += _block("copy", [[step.action for step in steps] for steps in plan.copies])
    return grid


def from_grid(text: str, block: Literal["rank", "copy"] = "rank") -> tuple[tuple[Action, ...], ...]:
    """Read back what `to_grid` printed: the lines of one block, in rank order. Blank lines are skipped.

    Raises:
        PlanError: a line has another form, ranks are not numbered 0, 1, 2, ..., or a word is not an action.
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
        rows.append(tuple(Action.parse(word) for word in match[3].split()))
    return tuple(rows)


def label(block: str, rank: int, num_ranks: int) -> str:
    """Head of a line, equally wide for every rank."""
    return f"{block} {rank:>{len(str(num_ranks - 1))}} |"


def _block(block: str, rows: Rows) -> str:
    lines = [" ".join([label(block, rank, len(rows)), *map(str, row)]) for rank, row in enumerate(rows)]
    return "".join(line + "\n" for line in lines)
