"""The oracle: the best decisions there are for a small chunk table, with proof. Needs the extra ``milp``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, InfeasibleError, PlanError, Remedy
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.exact.milp import Solution
from megatron_epp.planner.exact.model import OracleModel
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.tabulate import tabulate

Judge = Callable[[Decisions | None], float]
"""Makespan of decisions in microseconds; infinite where they are unsound or there are none."""

SPARE = 1e-5
"""Share of the caps kept free where the solver's answer is above one by less than its tolerance."""
EASIER_SHARE = 0.3
"""Share of the time limit spent on the same case with whole backwards; set by hand."""
TOLERANCE = 1e-6
"""Makespans closer than this, relative, are the same to the solver."""


@dataclass(frozen=True, slots=True)
class Proven:
    """Result of the oracle for a chunk table.

    Attributes:
        decisions: the best found, or None when none was found in time.
        makespan_us: makespan of the decisions; infinite without them.
        bound_us: no decisions for these chunks are faster under these caps (up to the solver's tolerance).
        optimal: bound and makespan are the same.
    """

    decisions: Decisions | None
    makespan_us: float
    bound_us: float
    optimal: bool


def oracle(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    options: Options,
    *,
    start: Decisions | None = None,
    time_limit_s: float | None = None,
) -> Proven:
    """Find the decisions of least makespan for a given chunk table.

    Exact over all orders that `check` accepts and all numbers of recomputed layers per stage and chunk, with the bytes that a
    plan's steps carry. With `options.split_weight` also over which weight gradients are actions of their own and when they run.
    It knows whole layers only, and no copies to the host.

    The time it takes grows steeply: 3 stages with 6 chunks are seconds, 4 with 8 minutes; with weight gradients, 2 with 3.

    Args:
        chunks: the chunk table.
        problem, costs, options: as `plan` takes them.
        start: decisions for the same chunks; only what is faster is looked for, and they are the answer when nothing is.
        time_limit_s: stop after so long with the best found so far and the bound proven so far.

    Raises:
        InfeasibleError: no decisions for these chunks fit the caps.
        PlanError: a placement, a fixed recompute or an evaluation, which it does not know; or scipy is not installed.
    """
    _known(problem, options)
    options = replace(options, offload=False)
    tables = tabulate(chunks, problem, costs)
    judge = partial(_makespan_us, problem, costs, options)
    made = None if start is None else replace(start, chunks=tuple(chunks))
    if options.split_weight:  # with whole backwards it takes little time, and gives the full program a shorter horizon
        began_s = time.monotonic()
        share_s = None if time_limit_s is None else time_limit_s * EASIER_SHARE
        try:
            whole = replace(options, split_weight=False)
            made = oracle(chunks, problem, costs, whole, start=made, time_limit_s=share_s).decisions
        except InfeasibleError:
            made = None
        time_limit_s = None if time_limit_s is None else max(0.0, time_limit_s - (time.monotonic() - began_s))
    made_us = judge(made)
    made = None if math.isinf(made_us) else made
    horizon_us = made_us if made else _serial_us(tables)
    bound_us = min(horizon_us, lower_bound_us(tables, tuple(chunks), problem, options))
    if bound_us >= horizon_us * (1 - TOLERANCE):
        return Proven(made, made_us, bound_us, made is not None)
    bounds = horizon_us, bound_us
    models = (
        OracleModel(chunks, tables, problem.cap_bytes, *bounds, split_weight=options.split_weight, spare=spare)
        for spare in (0.0, SPARE)
    )
    solved, found = _solved(models, tuple(chunks), judge, time_limit_s)
    if math.isinf(solved.bound) and solved.bound > 0:
        if made is None:
            raise InfeasibleError(
                f"no decisions for these {len(chunks)} chunks fit a memory cap of {min(problem.cap_bytes)} bytes per rank",
                Remedy("raise", "cap_bytes"),
            )
        return Proven(made, made_us, made_us * (1 - TOLERANCE), True)
    bound_us = max(bound_us, solved.bound * horizon_us)
    if (took_us := judge(found)) < made_us:
        made, made_us = found, took_us
    return Proven(made, made_us, min(bound_us, made_us), made is not None and bound_us >= made_us * (1 - 10 * TOLERANCE))


def _solved(
    models: Iterable[OracleModel], chunks: tuple[Chunk, ...], judge: Judge, time_limit_s: float | None
) -> tuple[Solution, Decisions | None]:
    """Solve the exact program; where its decisions miss a cap by a hair, solve it with a little memory to spare.

    Args:
        models: the program, then the same with memory to spare; written when needed.
        chunks: the chunk table.
        judge: of their decisions.
        time_limit_s: for all of them.

    Returns:
        The solution of the first, and sound decisions where one has any.
    """
    end_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    first: Solution | None = None
    for written in models:
        solved = written.model.solve(time_limit_s=None if time_limit_s is None else max(0.0, end_s - time.monotonic()))
        first = first or solved
        if solved.values is None:
            break
        made = Decisions(chunks, written.orders.order(solved.values), written.recompute(solved.values))
        if not math.isinf(judge(made)):
            return first, made
    assert first is not None
    return first, None


def _makespan_us(problem: Problem, costs: Costs, options: Options, made: Decisions | None) -> float:
    """Makespan of the plan, in microseconds; infinite if it does not pass `check` or there are no decisions.

    Args:
        problem, costs, options: as for `plan`.
        made: the decisions, or None.
    """
    if made is None:
        return math.inf
    try:
        return build_plan(problem, costs, options, made).predicted.makespan_us
    except PlanError:
        return math.inf


def _serial_us(tables: Tables) -> float:
    """One action after another, everything recomputed: any schedule that makes sense is faster."""
    rows = zip(tables.forward_us, tables.backward_us, tables.layer_us, tables.num_layers, strict=True)
    work = sum(sum(ahead) + sum(back) + most * sum(layer) for ahead, back, layer, most in rows)
    return work + 2 * sum(map(sum, tables.hops))


def _known(problem: Problem, options: Options) -> None:
    if not problem.has_one_stage_per_rank or problem.forward_only:
        remedy = Remedy("set", "planner", "greedy")
        raise PlanError("the oracle plans only training with one stage on each rank, in order", remedy)
    if options.recompute != "auto":
        raise PlanError(
            f"the oracle chooses recompute itself; it cannot take {options.recompute} layers",
            Remedy("set", "recompute", "auto"),
        )
