"""Tables of torch.distributed.pipelining (CSV): a row for every rank, and a column for every step.

A cell is ``<stage><operation><microbatch>`` or empty: F forward, B backward, I its first half without weight gradients, W
those; several that overlap as ``(0F1;7B0)OVERLAP_F_B``. An older notation has B for the first half and BW for the whole
backward; a table without I which has BW, or in which a B has a W next to it, is read as that. Cells for sharded weights are
left out, and sends and receives are launches (`launches_of`).
"""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

from megatron_epp.contrib.foreign.pass_rows import Pass, action_of, plan_of
from megatron_epp.plan.action import Action
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.launches import Rows
from megatron_epp.plan.plan import Plan

SOURCE = "torch.distributed.pipelining"
_COMPUTE = re.compile(r"(\d{1,9})(F|BW|B|I|W)(\d{1,9})", re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)
_MESSAGE = re.compile(r"\d{1,9}(SEND_F|RECV_F|SEND_B|RECV_B)\d{1,9}", re.ASCII)
_OTHER = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}", re.ASCII)


class _Cell(NamedTuple):
    """A cell of a table: the passes of a step, or a send or receive, or neither."""

    passes: tuple[Pass, ...] = ()
    message: Action | None = None


def from_pipelining(text: str) -> Plan:
    """Read a table as a plan. Takes and raises what `foreign.from_table` does."""
    return plan_of([[cell.passes for cell in row if cell.passes] for row in _rows(text)], SOURCE)


def launches_of(text: str) -> Rows | None:
    """Return what every rank launches, in order, by a table that has sends and receives; None for one without. Raises
    `PlanError` where a cell has another form.
    """
    rows = _rows(text)
    if not any(cell.message for row in rows for cell in row):
        return None
    return [
        [action for cell in row for action in ([cell.message] if cell.message else map(action_of, cell.passes))] for row in rows
    ]


def _rows(text: str) -> list[list[_Cell]]:
    """Return the cells of every rank, the halves of backwards under their present names."""
    try:
        cells = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise PlanError(f"the table is no CSV: {error}") from error
    rows = [[_read(cell.strip(), rank, at) for at, cell in enumerate(row)] for rank, row in enumerate(cells)]
    every = [entry for row in rows for cell in row for entry in cell.passes]
    split = {entry[1:] for entry in every if entry.kind == "W"}
    has_whole = any(entry.kind == "BW" for entry in every)
    is_old = has_whole or any(entry.kind == "B" and entry[1:] in split for entry in every)
    if not is_old or any(entry.kind == "I" for entry in every):
        return rows

    def renamed(entry: Pass) -> Pass:
        is_first_half = entry.kind == "B" and (has_whole or entry[1:] in split)
        return entry._replace(kind="I" if is_first_half else entry.kind.removesuffix("W") or "W")

    return [[cell._replace(passes=tuple(map(renamed, cell.passes))) for cell in row] for row in rows]


def _read(cell: str, rank: int, at: int) -> _Cell:
    """Return a cell.

    Args:
        rank, at: row and column, from 0.
    """
    overlapped = _OVERLAPPED.fullmatch(cell)
    matches = [_COMPUTE.fullmatch(word) for word in (overlapped[1].split(";") if overlapped else [cell])]
    if not cell or _OTHER.fullmatch(cell):
        return _Cell()
    if _MESSAGE.fullmatch(cell):
        return _Cell(message=Action.parse(cell))
    if not all(matches):
        raise PlanError(f"row {rank + 1}, cell {at + 1} of the table is {cell[:40]!r}; expected a pass such as 0F3, or nothing")
    return _Cell(tuple(Pass(match[2], int(match[1]), int(match[3])) for match in matches if match is not None))
