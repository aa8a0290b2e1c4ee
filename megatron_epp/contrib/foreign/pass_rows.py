"""Rows of passes, as tables of other systems have them, and the plan that they are."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.plan import UNLIMITED_BYTES, Messages, Plan, Prediction, Step
from megatron_epp.plan.proof import check
from megatron_epp.plan.recompute import NO_RECOMPUTE
from megatron_epp.plan.simulation import simulate

MOST_PASSES = 4_000_000
"""Number of passes that are read at most."""
_OPERATIONS = {"F": Op.F, "B": Op.B, "I": Op.B, "W": Op.W}


class Pass(NamedTuple):
    """An entry of a table."""

    kind: str  # F, a forward; B, a whole backward; I, a backward without weight gradients; W, the weight gradients
    stage: int  # of the pipeline
    microbatch: int  # from 0
    part: int = 0  # slice of the microbatch, from 0


Row = Sequence[tuple[Pass, ...]]
"""Steps of a rank; several passes of a step overlap."""


def plan_of(rows: Sequence[Row], source: str, parts: int = 1) -> Plan:
    """Return the plan that rows are.

    Args:
        rows: of every rank.
        parts: slices of every microbatch.

    Raises:
        PlanError: a row is empty, a stage is on two ranks or on none, or a part of a backward is missing or there twice.
    """
    every = [entry for row in rows for together in row for entry in together]
    if empty := [rank for rank, row in enumerate(rows or [[]]) if not row]:
        raise PlanError(f"row {empty[0] + 1} of the table has no passes")
    _check_weights(every)
    if len(every) > MOST_PASSES:
        raise PlanError(f"the table has {len(every):,} passes; {MOST_PASSES:,} are read at most")
    placement = _placement(rows)
    microbatches, stages = 1 + max(entry.microbatch for entry in every), len(placement)
    count = microbatches * parts
    if count * stages > MOST_PASSES:
        raise PlanError(f"the table has {count:,} microbatches on {stages:,} stages; {MOST_PASSES:,} of both are read at most")
    split = {(entry.stage, entry.microbatch * parts + entry.part) for entry in every if entry.kind == "W"}
    nothing = ((0.0,) * count,)
    plan = Plan(
        lengths=(parts,) * microbatches,
        chunks=tuple(Chunk((Segment(number // parts, number % parts, number % parts + 1),)) for number in range(count)),
        num_layers=(1,) * stages,
        placement=placement,
        recompute=((NO_RECOMPUTE,) * count,) * stages,
        recompute_us=nothing * stages,
        offload_share=nothing * stages,
        ranks=tuple(tuple(_step([action_of(entry, parts) for entry in together], split) for together in row) for row in rows),
        messages=Messages(nothing * (stages - 1), nothing * (stages - 1)),
        static_bytes=(0,) * len(rows),
        cap_bytes=(UNLIMITED_BYTES,) * len(rows),
        predicted=Prediction.none(len(rows)),
        forward_only=all(entry.kind == "F" for entry in every),
        costs="unit",
        planner=source,
    )
    with suppress(PlanError):  # `check` says why it cannot run
        line = simulate(plan)
        return replace(plan, predicted=Prediction(line.makespan_us, 0.0, tuple(line.peak_bytes), line.bubble_fraction))
    return plan


def placed(rows: Sequence[Row], source: str, parts: int = 1) -> Plan:
    """Return the plan of rows that number the stages of each rank alone.

    Two stages of a rank are looped or a V, which such tables do not say: it is the one with fewer violations, looped if equal.

    Args:
        rows, source, parts: as `plan_of` takes them.
    """
    held = 1 + max((entry.stage for row in rows for together in row for entry in together), default=0)
    if held * len(rows) > MOST_PASSES:
        raise PlanError(
            f"the table has {held:,} stages on each of {len(rows):,} ranks; {MOST_PASSES:,} in all are read at most"
        )
    shapes: tuple[Literal["looped", "v"], ...] = ("looped", "v") if held == 2 else ("looped",)
    plans = []
    for shape in shapes:
        placement = Placement(shape, len(rows), held)
        stage_of = [placement.stages(rank) for rank in range(len(rows))]
        numbered = [
            [tuple(entry._replace(stage=stage_of[rank][entry.stage]) for entry in together) for together in row]
            for rank, row in enumerate(rows)
        ]
        plans.append(plan_of(numbered, source, parts))
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: len(check(plan)))


def _check_weights(every: Iterable[Pass]) -> None:
    """Raise `PlanError` where a weight gradient is missing or computed twice, which plans cannot say of a whole backward."""
    kinds: dict[tuple[int, int, int], set[str]] = {}
    for kind, *where in every:
        kinds.setdefault((where[0], where[1], where[2]), set()).add(kind)
    for (stage, microbatch, _), has in kinds.items():
        if {"I", "B"} <= has or {"B", "W"} <= has:
            other = "I" if "I" in has else "W"
            raise PlanError(f"stage {stage} has B and {other} of microbatch {microbatch}: B is both parts of the backward")
        if ("I" in has) != ("W" in has):
            present, absent = ("I", "W") if "I" in has else ("W", "I")
            raise PlanError(
                f"stage {stage} has {present} of microbatch {microbatch} and never {absent}, the other part of the backward"
            )


def _placement(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return the rank of every stage. Raises `PlanError` where a stage has two or none."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage in {entry.stage for together in row for entry in together}:
            if rank_of.setdefault(stage, rank) != rank:
                raise PlanError(f"stage {stage} of the table is on ranks {rank_of[stage]} and {rank}")
    missing = next((stage for stage in range(max(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        raise PlanError(f"stage {missing} of the table has no passes, and there is a stage {max(rank_of)}")
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def action_of(entry: Pass, parts: int = 1) -> Action:
    """Return the action that an entry is, with slices numbered over all microbatches."""
    return Action(_OPERATIONS[entry.kind], entry.stage, entry.microbatch * parts + entry.part)


def _step(together: Sequence[Action], split: Container[tuple[int, int]]) -> Step:
    """Return a step with unit times and bytes.

    Args:
        split: stages and chunks whose weight gradient is an action of its own.
    """
    time_us = alloc_bytes = free_bytes = 0
    for action in together:
        is_split = (action.stage, action.chunk) in split
        time_us += 2 if action.op is Op.B and not is_split else 1
        alloc_bytes += action.op is Op.F
        free_bytes += action.op is Op.W or (action.op is Op.B and not is_split)
    return Step(together[0], float(time_us), alloc_bytes, free_bytes, tuple(together[1:]))
