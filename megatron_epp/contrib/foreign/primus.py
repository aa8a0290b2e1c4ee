"""Schedule tables that AMD's Primus logs: a line ``Rank 0: (F|0|0),(SF|0|0),(BW|0|0)`` for every rank.

A node is ``(operation|microbatch|stage of the rank)``: F, B without weight gradients, W these, BW both. Nodes in brackets
overlap. Sends and receives (SF, RF, SB, RB) and copies (O, R) are left out, and so are colours and what a logger writes in
front.
"""

from __future__ import annotations

import re

from megatron_epp.contrib.foreign.pass_rows import Pass, placed
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import brief

SOURCE = "Primus"
_KINDS = {"F": "F", "B": "I", "W": "W", "BW": "B"}
_OTHER = {"SF", "RF", "SB", "RB", "O", "R"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ROW = re.compile(r"\bRank (\d{1,6}): *([\[(].*)", re.ASCII)
_NODE = re.compile(r"(\[?)\((\w{1,20})\|(\d{1,9})\|(\d{1,9})\)(\]?)", re.ASCII)


def is_table(text: str) -> bool:
    """Return True if a line is a row of such a table."""
    return _ROW.search(_COLOUR.sub("", text)) is not None


def from_primus(text: str) -> Plan:
    """Read a table as a plan. Takes and raises what `foreign.from_table` does."""
    rows: dict[int, list[tuple[Pass, ...]]] = {}
    for line in _COLOUR.sub("", text).splitlines():
        if row := _ROW.search(line):
            rank = int(row[1])
            if rank in rows:
                raise PlanError(f"the table has two rows of rank {rank}")
            rows[rank] = _read(row[2], rank)
    if missing := [rank for rank in range(len(rows)) if rank not in rows]:
        raise PlanError(f"the table has no row of rank {missing[0]}, and one of rank {max(rows)}")
    return placed([rows[rank] for rank in range(len(rows))], SOURCE)


def _read(text: str, rank: int) -> list[tuple[Pass, ...]]:
    """Return the steps of a row."""
    steps: list[tuple[Pass, ...]] = []
    open_step: list[Pass] | None = None
    for word in text.strip().split(","):
        node = _NODE.fullmatch(word.strip())
        if node is None or node[2] not in (*_KINDS, *_OTHER):
            raise PlanError(f"rank {rank} of the table has {brief(word[:40])}; expected a node such as (F|3|0)")
        if node[1]:
            open_step = []
        if kind := _KINDS.get(node[2]):
            entry = Pass(kind, int(node[4]), int(node[3]))
            if open_step is None:
                steps.append((entry,))
            else:
                open_step.append(entry)
        if node[5] and open_step is not None:
            steps += [tuple(open_step)] if open_step else []
            open_step = None
    if open_step is not None:
        raise PlanError(f"rank {rank} of the table has a bracket that does not end")
    return steps
