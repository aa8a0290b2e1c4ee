"""Decisions from which no plan can be written, refused with the report of a plan that cannot run.

`check` has the last word. But writing looks up costs by stage and chunk, partly in compiled loops that do not watch the ends of
their columns, so whatever lies beyond these is refused before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.plan import (
    NO_RECOMPUTE,
    Action,
    Chunk,
    Copy,
    KVOffload,
    Messages,
    Op,
    Plan,
    PlanError,
    Prediction,
    Segment,
    Step,
)
from megatron_epp.plan.columns import columns_of, listed
from megatron_epp.plan.operations import Track, operations
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.proof import report
from megatron_epp.plan.proof.actions import check_presence
from megatron_epp.plan.proof.plan_tables import check_kv_offload, check_tokens
from megatron_epp.plan.violation import Violation, fault
from megatron_epp.planner.assemble import cannot_run
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.validation import as_one_chunk


def refuse_mistakes(decisions: Decisions, problem: Problem, costs: Costs, planner: str) -> None:
    """Raise `PlanError`, with the report, for decisions from which no plan can be written, whatever their recompute."""
    with _of_types(planner):
        _refuse_types(decisions, planner)
        faults = [fault(reason) for reason in (*_shapes(decisions, problem, costs), *decisions.faults())]
        if not faults:
            plan = outline(decisions, problem, costs)
            columns = columns_of(plan)
            presence = check_presence(plan, columns, listed(plan, columns))
            faults = [*check_tokens(plan), *presence, *_recomputes(plan)] or [*check_kv_offload(plan)]
        _refuse(faults, decisions, problem, costs, planner)


def whole_layers(decisions: Decisions, problem: Problem, costs: Costs, tables: Tables, planner: str) -> RecomputeSteps:
    """Return the recompute as lists of whole numbers, checked against the recompute frontiers of the tables. Raises
    `PlanError`, with the report, if its shape, type or range is wrong.
    """
    rows, stages, chunks = decisions.recompute_steps, problem.num_stages, len(decisions.chunks)
    reasons: list[str] = []
    with _of_types(planner):
        if len(rows) != stages or any(len(row) != chunks for row in rows):
            sizes = sorted({len(row) for row in rows})
            reasons = [f"recompute_steps has {len(rows)} rows of {sizes} entries; expected {stages} rows of {chunks}"]
            rows = []
        num_steps = np.array(rows, dtype=None if len(rows) else np.int64)
        if num_steps.dtype.kind != "i":
            reasons = [f"recompute_steps holds values of type {num_steps.dtype}; how many layers recompute is a whole number"]
        elif not reasons:
            most = np.reshape(tables.columns.most, num_steps.shape)
            unit = "layers" if len(decisions.modes) == 1 else "steps of its recompute frontier"
            beyond = np.argwhere((num_steps < 0) | (num_steps > most)).tolist()
            reasons = [f"stage {s} recomputes {num_steps[s, c]} {unit} of chunk {c}; it has {most[s, c]}" for s, c in beyond]
        _refuse(map(fault, reasons), decisions, problem, costs, planner)
    recompute_steps: RecomputeSteps = num_steps.tolist()
    return recompute_steps


def refuse_table(decisions: Decisions, problem: Problem, costs: Costs, planner: str) -> None:
    """Look at the chunks alone, which have to be in forward order. Raises as `refuse_mistakes` does."""
    with _of_types(planner):
        _refuse_types(decisions, planner)
        faults = [*check_tokens(outline(decisions, problem, costs))] or [*_out_of_order(decisions.chunks)]
        _refuse(faults, decisions, problem, costs, planner)


def _refuse(faults: Iterable[Violation], decisions: Decisions, problem: Problem, costs: Costs, planner: str) -> None:
    if violations := list(faults):
        raise PlanError(cannot_run(planner) + report(outline(decisions, problem, costs), violations))


def outline(decisions: Decisions, problem: Problem, costs: Costs) -> Plan:
    """Return the plan of decisions before anything is known of its times and bytes, which are all zero."""
    none = [0.0] * len(decisions.chunks)
    shares, no_time = decisions.offload or [none] * problem.num_stages, (tuple(none),) * (problem.num_stages - 1)
    return Plan(
        lengths=problem.lengths,
        chunks=tuple(decisions.chunks),
        num_layers=costs.num_layers,
        placement=problem.placement,
        recompute=((NO_RECOMPUTE,) * len(none),) * problem.num_stages,
        recompute_us=(tuple(none),) * problem.num_stages,
        offload_share=tuple(map(tuple, shares)),
        ranks=tuple(tuple(Step(action, 0.0, 0, 0) for action in row) for row in decisions.order),
        copies=tuple(tuple(Copy(action, 0.0, 0, 0, after) for action, after in row) for row in decisions.copies),
        kv_offload=tuple(KVOffload(stage, sequence, 0, 0) for stage, sequence in sorted(decisions.kv_offload)),
        messages=Messages(no_time, no_time),
        static_bytes=(0,) * problem.num_ranks,
        cap_bytes=problem.cap_bytes,
        predicted=Prediction.none(problem.num_ranks),
        forward_only=problem.forward_only,
    )


@contextmanager
def _of_types(planner: str) -> Iterator[None]:
    """Refuse tables that cannot be read: no rows, no pairs, or entries that do not compare."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(
            f"{cannot_run(planner)}a field of its decisions does not have its type in `Decisions`: {error}"
        ) from error


def _refuse_types(decisions: Decisions, planner: str) -> None:
    if wrong := next(_types(decisions), None):
        raise PlanError(f"{cannot_run(planner)}{wrong}")


def _types(decisions: Decisions) -> Iterator[str]:
    for chunk in decisions.chunks:
        if not (isinstance(chunk, Chunk) and all(isinstance(part, Segment) for part in chunk.segments)):
            yield f"{chunk!r} is not a Chunk of Segments"
        elif not all(isinstance(number, int | np.integer) for part in chunk.segments for number in part):
            yield f"{chunk!r} has segments of something else than whole numbers"
    copied = ((action, after or action) for row in decisions.copies for action, after in row)
    for action in chain(*decisions.order, *copied):
        if not (isinstance(action, Action) and type(action.op) is Op and type(action.stage) is type(action.chunk) is int):
            yield f"{action!r} is not an Action of an Op and two of Python's own whole numbers"


def _shapes(decisions: Decisions, problem: Problem, costs: Costs) -> Iterator[str]:
    stages, chunks, ranks = problem.num_stages, len(decisions.chunks), problem.num_ranks
    for name, table in (("order", decisions.order), ("copies", decisions.copies or ((),) * ranks)):
        if len(table) != ranks:
            yield f"{name} has {len(table)} rows for {ranks} ranks"
    shares = decisions.offload or ([[0.0] * chunks] * stages)
    if len(shares) != stages or any(len(row) != chunks for row in shares):
        sizes = sorted({len(row) for row in shares})
        yield f"offload has {len(shares)} rows of {sizes} entries; expected {stages} rows of {chunks}"
    ordered, token = {action.op for row in decisions.order for action in row}, as_one_chunk(1, 1)
    without = [
        f"{kind.op} ({kind.text})"
        for kind in operations(Track.COMPUTE)
        if kind.op in ordered and kind.rows is not None and kind.rows(costs, kind.sites(problem.placement), token) is None
    ]
    if without:
        yield f"order has {', '.join(without)}; the costs have no such operation"
    known = costs.recompute_modes
    if not decisions.modes or not set(decisions.modes) <= set(known):
        yield f"recompute modes are {list(decisions.modes)}; the costs know {', '.join(known)}"
    multiple = decisions.token_multiple
    if multiple is not None and not (isinstance(multiple, int) and multiple > 0):
        yield f"token_multiple is {multiple}; it is a whole number of at least 1"


def _out_of_order(chunks: Sequence[Chunk]) -> Iterator[Violation]:
    """Yield slices that do not stand behind the slice before them: chunks are numbered in the order of their forwards."""
    for c, chunk in enumerate(chunks):
        sequence, start, _ = chunk.segments[0]
        ends = [(part.sequence, part.end) for part in chunks[c - 1].segments] if c else []
        if start and (sequence, start) not in ends:
            yield fault(f"chunk {c} goes on with sequence {sequence} at token {start}, where chunk {c - 1} does not end")


def _recomputes(plan: Plan) -> Iterator[Violation]:
    """Yield recompute actions: decisions state recompute in layers, and such an action has no costs."""
    for rank, steps in enumerate(plan.ranks):
        for position, step in enumerate(steps):
            if step.action.op is Op.R:
                reason = "a planner says what recomputes by its layers; an action of its own has no costs"
                yield Violation(rank, position, step.action, reason)
