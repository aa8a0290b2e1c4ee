"""Tables of torch.distributed.pipelining (CSV): a row for every rank, and a column for every step.

A cell is ``<stage><operation><microbatch>`` (F forward, B backward, I its first half without weight gradients, W those; several
that overlap as ``(0F1;7B0)OVERLAP_F_B``) or empty. Cells for communication and sharded weights are left out.
"""

from __future__ import annotations

import csv
import re

from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.foreign.rows import Pass, plan_of
from megatron_epp.plan.plan import Plan

SOURCE = "torch.distributed.pipelining"
_COMPUTE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)
_OTHER = re.compile(r"\d{1,9}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}", re.ASCII)


def from_pipelining(text: str) -> Plan:
    """Read a table as a plan. Arguments and errors as for `foreign.from_table`."""
    try:
        cells = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise PlanError(f"the table is no CSV: {error}") from error
    found = [[one for at, cell in enumerate(row) if (one := _read(cell.strip(), rank, at))] for rank, row in enumerate(cells)]
    return plan_of(found, SOURCE)


def _read(cell: str, rank: int, at: int) -> tuple[Pass, ...]:
    """Return the passes of a cell; none for an empty one and for communication.

    Args:
        cell: its text.
        rank, at: row and column, from 0.
    """
    overlapped = _OVERLAPPED.fullmatch(cell)
    found = [_COMPUTE.fullmatch(word) for word in (overlapped[1].split(";") if overlapped else [cell])]
    if not cell or _OTHER.fullmatch(cell):
        return ()
    if not all(found):
        raise PlanError(f"row {rank + 1}, cell {at + 1} of the table is {cell[:40]!r}; expected a pass such as 0F3, or nothing")
    return tuple(Pass(one[2], int(one[1]), int(one[3])) for one in found if one is not None)
