"""Schedules of torch.distributed.pipelining, read as plans from its tables (CSV).

A table has a row for every rank and a column for every step. A cell is ``<stage><operation><microbatch>`` (F forward, B
backward, I its first half without weight gradients, W those; several that overlap as ``(0F1;7B0)OVERLAP_F_B``) or empty. Cells
for communication and sharded weights are left out: messages follow from the order of the others. Microbatches are equal, and on
every stage F, B without weight gradient, and W take 1 us each. A forward keeps a byte until the last part of its backward.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import UNLIMITED_BYTES, Messages, Plan, Prediction, Step
from megatron_epp.plan.recompute import NO_RECOMPUTE
from megatron_epp.plan.simulate import simulate

_COMPUTE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)
_OTHER = re.compile(r"\d{1,9}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}", re.ASCII)
_OPERATIONS = {"F": Op.F, "B": Op.B, "I": Op.B, "W": Op.W}
PIPELINING = "torch.distributed.pipelining"
"""Planner of plans that are read from a table."""
MOST_CELLS = 4_000_000
"""Number of actions that are read at most."""

Together = tuple[Action, ...]


def from_pipelining(text: str) -> Plan:
    """Read a table as a plan, for `check` and `simulate`: it may be faulty.

    Args:
        text: of the table.

    Raises:
        PlanError: it is no such table: a cell has another form, or a stage is on two ranks or on none.
    """
    try:
        cells = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise PlanError(f"the table is no CSV: {error}") from error
    found = [[one for at, cell in enumerate(row) if (one := _read(cell.strip(), rank, at))] for rank, row in enumerate(cells)]
    if empty := [rank for rank, row in enumerate(found or [[]]) if not row]:
        raise PlanError(f"row {empty[0] + 1} of the table has no action: a cell is <stage><F, B, I or W><microbatch>")
    _check_weights(one for row in found for together in row for one in together)
    rows = [[tuple(one.action for one in together) for together in row] for row in found]
    every = [action for row in rows for together in row for action in together]
    if len(every) > MOST_CELLS:
        raise PlanError(f"the table has {len(every):,} actions; {MOST_CELLS:,} are read at most")
    placement = _placement(rows)
    count, stages = 1 + max(action.chunk for action in every), len(placement)
    if count * stages > MOST_CELLS:
        raise PlanError(f"the table has {count:,} microbatches on {stages:,} stages; {MOST_CELLS:,} of both are read at most")
    split = {(action.stage, action.chunk) for action in every if action.op is Op.W}
    nothing = ((0.0,) * count,)
    made = Plan(
        lengths=(1,) * count,
        chunks=tuple(Chunk((Segment(number, 0, 1),)) for number in range(count)),
        num_layers=(1,) * stages,
        placement=placement,
        recompute=((NO_RECOMPUTE,) * count,) * stages,
        recompute_us=nothing * stages,
        offload_share=nothing * stages,
        ranks=tuple(tuple(_step(together, split) for together in row) for row in rows),
        messages=Messages(nothing * (stages - 1), nothing * (stages - 1)),
        static_bytes=(0,) * len(rows),
        cap_bytes=(UNLIMITED_BYTES,) * len(rows),
        predicted=Prediction.none(len(rows)),
        forward_only=all(action.op is Op.F for action in every),
        costs="unit",
        planner=PIPELINING,
    )
    with suppress(PlanError):  # `check` says why it cannot run
        line = simulate(made)
        return replace(made, predicted=Prediction(line.makespan_us, 0.0, tuple(line.peak_bytes), line.bubble_fraction))
    return made


class _Read(NamedTuple):
    """An action, and the letter that the table has for it."""

    action: Action
    letter: str


def _read(cell: str, rank: int, at: int) -> tuple[_Read, ...]:
    """Return the actions of a cell; none for an empty one and for communication.

    Args:
        cell: its text.
        rank, at: row and column, from 0.
    """
    overlapped = _OVERLAPPED.fullmatch(cell)
    found = [_COMPUTE.fullmatch(word) for word in (overlapped[1].split(";") if overlapped else [cell])]
    if not cell or _OTHER.fullmatch(cell):
        return ()
    if not all(found):
        raise PlanError(
            f"row {rank + 1}, cell {at + 1} of the table is {cell[:40]!r}; expected an action such as 0F3, or nothing"
        )
    return tuple(_Read(Action(_OPERATIONS[one[2]], int(one[1]), int(one[3])), one[2]) for one in found if one is not None)


def _check_weights(every: Iterable[_Read]) -> None:
    """Raise `PlanError` where a weight gradient is missing or computed twice, which plans cannot say of a whole backward."""
    letters: dict[tuple[int, int], set[str]] = {}
    for action, letter in every:
        letters.setdefault((action.stage, action.chunk), set()).add(letter)
    for (stage, chunk), has in letters.items():
        if {"I", "B"} <= has or {"B", "W"} <= has:
            other = "I" if "I" in has else "W"
            raise PlanError(f"stage {stage} has B and {other} of microbatch {chunk}: B is both parts of the backward")
        if ("I" in has) != ("W" in has):
            one, other = ("I", "W") if "I" in has else ("W", "I")
            raise PlanError(f"stage {stage} has {one} of microbatch {chunk} and never {other}, the other part of the backward")


def _placement(rows: Sequence[Sequence[Together]]) -> tuple[int, ...]:
    """Return the rank of every stage. Raises `PlanError` where a stage has two or none."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage in {action.stage for together in row for action in together}:
            if rank_of.setdefault(stage, rank) != rank:
                raise PlanError(f"stage {stage} of the table is on ranks {rank_of[stage]} and {rank}")
    missing = next((stage for stage in range(max(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        raise PlanError(f"stage {missing} of the table has no action, and there is a stage {max(rank_of)}")
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _step(together: Together, split: Container[tuple[int, int]]) -> Step:
    """Return a step with unit times and bytes.

    Args:
        together: actions that overlap; their times add up.
        split: stages and chunks whose weight gradient is an action of its own.
    """
    time_us = alloc_bytes = free_bytes = 0
    for action in together:
        is_split = (action.stage, action.chunk) in split
        time_us += 2 if action.op is Op.B and not is_split else 1
        alloc_bytes += action.op is Op.F
        free_bytes += action.op is Op.W or (action.op is Op.B and not is_split)
    return Step(together[0], float(time_us), alloc_bytes, free_bytes, together[1:])
