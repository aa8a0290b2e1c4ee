"""Violations found by `check`, and their text form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.plan.action import Action
from megatron_epp.plan.grid import label, step_text
from megatron_epp.plan.plan import AnyStep, Plan

_AROUND = 6
"""Steps shown on either side of a violation."""
_AT_MOST = 20


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of a plan: of its tables if `rank` is None, of `plan.copies` if `in_copies`, else of `plan.ranks`."""

    rank: int | None
    position: int | None
    action: Action | None
    reason: str
    in_copies: bool = False

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        if self.position is not None:
            where.append(f"{'copy ' if self.in_copies else ''}position {self.position}")
        if self.action is not None:
            where.append(str(self.action))
        return f"{' '.join(where)}: {self.reason}" if where else self.reason


def fault(reason: str, rank: int | None = None) -> Violation:
    """Return a fault of a plan's tables, or of no single step of a rank."""
    return Violation(rank, None, None, reason)


def report(plan: Plan, violations: Sequence[Violation]) -> str:
    """Format the grid with an arrow under each fault; one line if there is none. Long rows are cut around faults."""
    if not violations:
        return f"sound: {plan.num_ranks} ranks, {plan.num_stages} stages, {len(plan.chunks)} chunks\n"
    lines = [f"{len(violations)} violation{'s' if len(violations) > 1 else ''}"]
    shown = violations[:_AT_MOST]
    lines += [str(fault) for fault in shown if fault.position is None]
    for in_copies, table in plan.tables:
        for rank, steps in enumerate(table):
            here = [f for f in shown if f.rank == rank and f.position is not None and f.in_copies == in_copies]
            lines += _row(label("copy" if in_copies else "rank", rank, len(table)), steps, here)
    if len(violations) > len(shown):
        lines.append(f"... and {len(violations) - len(shown)} more")
    return "".join(line + "\n" for line in lines)


def _row(head: str, steps: Sequence[AnyStep], faults: Sequence[Violation]) -> list[str]:
    """Lines of a rank: the whole row if it is short; otherwise one cut per fault, or none without faults."""
    words = list(map(step_text, steps))
    if len(words) <= 4 * _AROUND:
        return [" ".join([head, *words]), *(_arrow(head, words, f.position or 0, f.reason) for f in faults)]
    lines = []
    for fault in faults:
        at = fault.position or 0
        first = max(0, at - _AROUND)
        cut = [*(["..."] if first else []), *words[first : at + _AROUND + 1]]
        lines.append(" ".join([head, *cut, *(["..."] if at + _AROUND + 1 < len(words) else [])]))
        lines.append(_arrow(head, cut, at - first + (first > 0), fault.reason))
    return lines


def _arrow(head: str, words: Sequence[str], at: int, reason: str) -> str:
    indent = len(" ".join([head, *words[:at]])) + 1
    return f"{' ' * indent}{'^' * len(words[at])} {reason}"
