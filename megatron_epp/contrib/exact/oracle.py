"""The oracle: the best decisions there are for a small chunk table, with proof. Needs the extra ``milp``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_epp.contrib.exact.added import times_of
from megatron_epp.contrib.exact.choices import SHARES
from megatron_epp.contrib.exact.solve import Case, logger, solve
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.tables import Tables, tabulate

TOLERANCE = 1e-4
"""Makespans closer than this, relative, are the same to the solver, whose times are whole ticks."""
WORKERS = 1
"""Threads of the solver: the background of a training run has one core to spare at most."""


@dataclass(frozen=True, slots=True)
class Proven:
    """Result of the oracle for a chunk table."""

    decisions: Decisions | None  # the best found, or None when none was found in time
    makespan_us: float  # makespan of the decisions; infinite without them
    # No decisions for these chunks are faster under these caps, with the recompute modes, the KV offload and the shares of
    # activations to copy that the oracle chose from
    bound_us: float
    optimal: bool  # bound and makespan are the same, up to `TOLERANCE`


def oracle(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    options: Options,
    *,
    start: Decisions | None = None,
    time_limit_s: float | None = None,
    workers: int = WORKERS,
) -> Proven:
    """Find the decisions of least makespan for a given chunk table, on any placement of the stages.

    Exact over all orders that `check` accepts, all numbers of recompute steps per stage and chunk, with
    `options.split_weight` over which weight gradients are actions of their own, and with `options.offload` over which
    activations are copied to host memory, in shares of `choices.SHARES` and of the start. Bytes are as in a plan's steps. Added
    operations, such as the vocabulary shards', take part in all of this. Recompute modes and KV offload stay as in the start.

    A plan's actions start as early as they can. The solver may let one wait until a copy has made room, so its answer may be
    no plan where copies are short; then the start stays the answer, and the bound is valid all the same.

    Order and recompute of eight chunks take about a second, with weight gradients up to minutes. Give a time limit if there is
    no start: to prove that nothing fits, or to find what just fits, can take longer than any optimum.

    Args:
        problem, costs, options: as `plan` takes them.
        start: decisions for the same chunks; only what is faster is looked for, and they are the answer when nothing is.
        time_limit_s: stop after so long with the best found so far and the bound proven so far.

    Raises:
        InfeasibleError: no decisions for these chunks fit the caps.
        PlanError: an evaluation, which it does not know; or OR-tools is not installed.
    """
    chunks = tuple(chunks)
    modes = options.modes(costs.recompute_modes) if start is None else start.modes
    judge = partial(makespan_us, problem, costs, options)
    tables = tabulate(chunks, problem, costs, modes) if start is None else start.tables(problem, costs)
    if problem.forward_only:
        raise PlanError("the oracle does not know evaluations", Remedy("set", "planner", "greedy"))
    start_us = judge(start)
    start = None if math.isinf(start_us) else start
    horizon_us = start_us if start else _serial_us(tables)
    bound_us = min(horizon_us, lower_bound_us(tables, chunks, problem, options))
    if start is not None and bound_us >= horizon_us * (1 - TOLERANCE):
        return _told(Proven(start, start_us, bound_us, optimal=True))
    shares = {*SHARES, *(share for row in (start.offload if start else ()) for share in row if share)}
    case = Case(chunks, tables, problem, options, tuple(sorted(shares, reverse=True)), horizon_us, bound_us)
    solved = solve(case, start, time_limit_s, workers)
    if math.isinf(solved.bound_us) and start is None:
        raise InfeasibleError(
            f"no decisions for these {len(chunks)} chunks fit a memory cap of {min(problem.cap_bytes)} bytes per rank",
            Remedy("raise", "cap_bytes"),
        )
    best, best_us = start, start_us
    if solved.decisions is not None:
        decisions = replace(solved.decisions, modes=modes, kv_offload=start.kv_offload if start else frozenset())
        if (decisions_us := judge(decisions)) < best_us:
            best, best_us = decisions, decisions_us
    bound_us = min(solved.bound_us, best_us)
    optimal = best is not None and bound_us >= best_us * (1 - TOLERANCE)
    return _told(Proven(best, best_us, bound_us, optimal))


def _told(proven: Proven) -> Proven:
    """Log a result, and return it."""
    said, above = "proven" if proven.optimal else "not proven", proven.makespan_us / proven.bound_us - 1
    logger.info("%s: %.3f ms, %s above the bound", said, proven.makespan_us / 1e3, f"{above:.2%}")
    return proven


def makespan_us(problem: Problem, costs: Costs, options: Options, decisions: Decisions | None) -> float:
    """Makespan of the plan, in microseconds; infinite if it does not pass `check` or there are no decisions.

    Args:
        problem, costs, options: as `plan` takes them.
        decisions: None where there are none.
    """
    if decisions is None:
        return math.inf
    try:
        return build_plan(problem, costs, options, decisions).predicted.makespan_us
    except PlanError:
        return math.inf


def _serial_us(tables: Tables) -> float:
    """One action after another, everything recomputed and copied: any schedule that makes sense is faster."""
    extra = sum(float(row.sum()) * passes.num_layers for passes in tables.passes for row in passes.frontier.layer_us)
    forward_us, backward_us = zip(*((own.forward_us, own.backward_us) for own in tables.passes), strict=True)
    times_us = *forward_us, *backward_us, *tables.hops, *tables.hops
    work = sum(sum(row.tolist()) for row in times_us) + sum(times_of(tables)) + extra
    if math.isinf(tables.host_us_per_byte):
        return work
    return work + 2 * sum(tables.host_us(size) for own in tables.passes for size in own.activation.tolist())
