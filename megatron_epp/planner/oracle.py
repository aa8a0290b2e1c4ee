"""The oracle: the best order and recompute there is for a small chunk table, with proof. Needs the extra ``milp``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_epp.cost import Costs
from megatron_epp.planner.assemble import Decisions
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.evaluate import Layers, makespan_us
from megatron_epp.planner.memory import peaks_bytes
from megatron_epp.planner.milp import Solution
from megatron_epp.planner.oracle_model import OracleModel
from megatron_epp.planner.order import Order
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.schedule import Chunk, InfeasibleError, PlanError

SPARE = 1e-5
"""Share of the caps kept free where the solver's answer is above one by less than its tolerance."""
TOLERANCE = 1e-6
"""Makespans closer than this, relative, are the same to the solver."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What the oracle knows of a chunk table.

    Attributes:
        decisions: the best found, or None when none was found in time.
        makespan_us: of the decisions; infinite without.
        bound_us: no order and no recompute of these chunks is faster under these caps (up to the solver's tolerance).
        optimal: bound and makespan are the same.
    """

    decisions: Decisions | None
    makespan_us: float
    bound_us: float
    optimal: bool

    @property
    def gap(self) -> float:
        """How much slower the decisions may be than the best, relative to the bound."""
        return self.makespan_us / self.bound_us - 1.0


def oracle(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    options: Options,
    *,
    start: Decisions | None = None,
    time_limit_s: float | None = None,
) -> Proven:
    """Find the order and recompute of least makespan for a given chunk table.

    Exact over all orders that `check` accepts, whole backwards, and all numbers of recomputed layers per stage and chunk.
    What it takes grows steeply: 3 stages with 6 chunks are seconds, 4 with 8 minutes.

    Args:
        chunks: the chunk table.
        start: decisions for the same chunks; only what is faster is looked for, and they are the answer when nothing is.
        time_limit_s: stop after so long with the best found so far and the bound proven so far.

    Raises:
        InfeasibleError: no order and no recompute of these chunks fits the caps.
        PlanError: a placement, a fixed recompute, an evaluation, offload or split weight gradients, which it does not know;
            or scipy is not installed.
    """
    _known(problem, options, costs)
    tables = tabulate(chunks, problem, costs)
    made, made_us = None, math.inf
    if start is not None and _fits(start.order, tables, start.layers, problem.cap_bytes):
        made, made_us = replace(start, chunks=tuple(chunks)), makespan_us(start.order, tables, start.layers)
    horizon_us = made_us if made else _serial_us(tables)
    bound_us = min(horizon_us, lower_bound_us(tables, tuple(chunks), problem, options))
    if bound_us >= horizon_us * (1 - TOLERANCE):
        return Proven(made, made_us, bound_us, made is not None)
    solved, order, layers = _solve(chunks, tables, problem.cap_bytes, horizon_us, bound_us, time_limit_s)
    if math.isinf(solved.bound) and solved.bound > 0:
        if made is None:
            raise InfeasibleError(
                f"no order and no recompute of these {len(chunks)} chunks fits a memory cap of {min(problem.cap_bytes)} bytes "
                f"per rank (--epp-memory-cap-gb)"
            )
        return Proven(made, made_us, made_us * (1 - TOLERANCE), True)
    bound_us = max(bound_us, solved.bound * horizon_us)
    if order and (took_us := makespan_us(order, tables, layers)) < made_us:
        made, made_us = Decisions(tuple(chunks), order, layers), took_us
    return Proven(made, made_us, min(bound_us, made_us), made is not None and bound_us >= made_us * (1 - 10 * TOLERANCE))


def _solve(
    chunks: Sequence[Chunk],
    tables: Tables,
    caps: tuple[int, ...],
    horizon_us: float,
    bound_us: float,
    time_limit_s: float | None,
) -> tuple[Solution, Order, Layers]:
    """The solution of the exact program; its decisions from one with a little spare where they are above a cap by a hair."""
    solutions: list[Solution] = []
    for spare in (0.0, SPARE):
        model = OracleModel(chunks, tables, caps, horizon_us, bound_us, spare)
        solutions.append(model.model.solve(time_limit_s=time_limit_s))
        values = solutions[-1].values
        if values is None:
            break
        order, layers = model.order(values), model.recompute(values)
        if _fits(order, tables, layers, caps):
            return solutions[0], order, layers
    return solutions[0], (), []


def _fits(order: Order, tables: Tables, layers: Layers, caps: Sequence[int]) -> bool:
    return all(peak <= cap for peak, cap in zip(peaks_bytes(order, tables, layers), caps, strict=True))


def _serial_us(tables: Tables) -> float:
    """One action after another, everything recomputed: any schedule that makes sense is faster."""
    rows = zip(tables.forward_us, tables.backward_us, tables.layer_us, tables.num_layers, strict=True)
    work = sum(sum(ahead) + sum(back) + most * sum(layer) for ahead, back, layer, most in rows)
    return work + 2 * sum(map(sum, tables.hops))


def _known(problem: Problem, options: Options, costs: Costs) -> None:
    if problem.placement != tuple(range(problem.num_stages)) or problem.forward_only:
        raise PlanError("the oracle knows training with one stage on each rank, in order (--epp-planner greedy knows more)")
    if options.recompute != "auto" or options.offload or (options.split_weight and costs.splits_weight):
        raise PlanError("the oracle chooses recompute itself and knows neither offload nor split weight gradients")
