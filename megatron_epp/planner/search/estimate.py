"""Estimate of a plan's makespan, in a small part of the time that planning takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_epp.cost import Costs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner import plan, uncollected
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.variants import by_length
from megatron_epp.planner.evaluate import backward_times
from megatron_epp.planner.messages import planned_with_room
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.grains import FEW
from megatron_epp.planner.search.order_rules import ELASTIC_1F1B, FIRST
from megatron_epp.planner.search.replicas import Replicas
from megatron_epp.planner.search.trials import Trials

CHUNKS_PER_RANK = (12, 6, 3, 24)
"""Grains that are tried, a middling one first. The search for a plan tries 15, each in more orders; not compared with other
choices.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The fastest of a few plans.

    Attributes:
        makespan_us: its makespan.
        chunks_per_rank: its grain, one of `CHUNKS_PER_RANK`; None where it runs sequences whole, or the user fixed the slices.
        busy_us: time of each rank's forwards and backwards, recompute included.
    """

    makespan_us: float
    chunks_per_rank: int | None
    busy_us: tuple[float, ...]


def estimate_us(problem: Problem, costs: Costs, options: Options) -> float:
    """Compute the least makespan of a few plans that the search would try too, in microseconds.

    Equal arguments give equal estimates, in every process. It has the pipeline's fill and the recompute that the caps force.

    Args:
        problem, costs, options: as `plan` takes them.

    Raises:
        PlanError: the arguments make no sense.
        InfeasibleError: this plan fits no cap; another may.
    """
    return _few(problem, costs, options)[0].best_us


def estimate(problem: Problem, costs: Costs, options: Options, grains: tuple[int, ...] = CHUNKS_PER_RANK) -> Estimate:
    """Make a few plans as `estimate_us` does, and describe the fastest.

    Args:
        problem, costs, options: as `plan` takes them.
        grains: chunks per rank that are tried. With fewer than all of `CHUNKS_PER_RANK` sequences are not tried whole.

    Raises:
        PlanError, InfeasibleError: as `estimate_us` raises them.
    """
    with uncollected():
        trials, cut = _few(problem, costs, options, grains)
        found = trials.result()
        tables, same = found.tables[0], (grain for grain, table in zip(grains, cut, strict=False) if table == found.table)
        backward_us = backward_times(tables, found.only.recompute_steps)
        busy_us = [tables.busy_us(rank, backward_us) for rank in range(problem.num_ranks)]
        return Estimate(found.makespan_us, None if options.slices is not None else next(same, None), tuple(busy_us))


def about_us(problem: Problem, costs: Costs, options: Options) -> float:
    """Estimate the makespan, or compute it where the estimate fits no cap, in microseconds. Raises what `plan` raises.

    Args:
        problem, costs, options: as `plan` takes them.
    """
    try:
        return estimate_us(problem, costs, options)
    except InfeasibleError:
        return plan(problem, costs, options).predicted.makespan_us


def rough_plan(problem: Problem, costs: Costs, options: Options) -> Plan:
    """Write the plan whose makespan `estimate_us` gives. Raises what it raises.

    Args:
        problem, costs, options: as `plan` takes them.
    """
    return planned_with_room(
        problem, lambda asked: build_plan(asked, costs, options, _few(asked, costs, options)[0].result().only)
    )


def _few(
    problem: Problem, costs: Costs, options: Options, grains: tuple[int, ...] = CHUNKS_PER_RANK
) -> tuple[Trials, list[Aligned | None]]:
    """Try a few chunk tables; return the candidates and the table of every grain, or of the slices that the user fixed."""
    validate(problem, costs, options)
    trials = Trials(Replicas((problem,), costs, replace(options, steps=0)))
    chunkers, rules = trials.replicas.shapes()[0], trials.rules
    tables = [chunkers.table(chunks=count * problem.num_ranks) for count in grains]
    if options.slices is not None:
        tables = [chunkers.table(slices=options.slices)]
    for table in tables:
        trials.better(table, rules.first)
    fits_whole = max(problem.lengths) <= chunkers.each[0].token_cap
    is_few = len(problem.lengths) <= FEW and grains == CHUNKS_PER_RANK
    if problem.has_one_stage_per_rank and options.slices is None and is_few and fits_whole:
        trials.better(Aligned((by_length(problem)[0],)), (ELASTIC_1F1B, *FIRST))
    for table in tables if trials.best is None else ():
        trials.better(table, rules.least)
    trials.result()
    return trials, tables
