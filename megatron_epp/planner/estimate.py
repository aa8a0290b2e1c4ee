"""Estimate of a plan's makespan, in a small part of the time that planning takes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner import plan, uncollected
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.candidates import Candidates
from megatron_epp.planner.evaluate import recompute_times
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.message_room import planned_with_room
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.search import MOST_WHOLE_SEQUENCES
from megatron_epp.planner.settings import WHOLE, first_recipe
from megatron_epp.planner.validation import validate

CHUNKS_PER_RANK = (12, 6, 3, 24)
"""Grains that are tried, a middling one first. The search for a plan tries 15, each in more orders."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The fastest of a few plans; `chunks_per_rank` is None where it runs sequences whole, or the user fixed the slices.
    `busy_us` is the time of each rank's forwards and backwards, recompute included.
    """

    makespan_us: float
    chunks_per_rank: int | None
    busy_us: tuple[float, ...]


def estimate_us(problem: Problem, costs: Costs, options: Options) -> float:
    """Compute the least makespan of a few plans that the search would try too, in microseconds.

    Equal arguments give equal estimates, in every process. It has the pipeline's fill and the recompute that the caps force.
    Raises `PlanError` if the arguments make no sense, and `InfeasibleError` if these plans fit no cap; others may.
    """
    return _few(problem, costs, options).fastest_us


def estimate(problem: Problem, costs: Costs, options: Options, grains: tuple[int, ...] = CHUNKS_PER_RANK) -> Estimate:
    """Make a few plans as `estimate_us` does, with its errors, and describe the fastest.

    With fewer `grains`, chunks per rank, than all of `CHUNKS_PER_RANK` sequences are not tried whole.
    """
    with uncollected():
        candidates = _few(problem, costs, options, grains)
        best = candidates.best()
        tables = candidates.tables_and_bound(best.table, best.recipe)[0][0]
        again_us = recompute_times(tables, best.whole_backwards[0].recompute_steps)
        forward = [sum(own.forward_us.tolist()) for own in tables.passes]
        backward = [sum((own.backward_us + row).tolist()) for own, row in zip(tables.passes, again_us, strict=True)]
        busy_us = [sum(times[stage] for times in (forward, backward) for stage in stages) for stages in tables.stages_of]
        grain = int(best.recipe.grain) if options.slices is None and best.recipe.grain != WHOLE else None
        return Estimate(best.makespan_us, grain, tuple(busy_us))


def about_us(problem: Problem, costs: Costs, options: Options) -> float:
    """Estimate the makespan, or compute it where the estimate fits no cap, in microseconds. Raises what `plan` raises."""
    try:
        return estimate_us(problem, costs, options)
    except InfeasibleError:
        return plan(problem, costs, options).predicted.makespan_us


def rough_plan(problem: Problem, costs: Costs, options: Options) -> Plan:
    """Write the plan whose makespan `estimate_us` gives. Raises what it raises."""

    def make(asked: Problem) -> Plan:
        return build_plan(asked, costs, options, _few(asked, costs, options).best().decisions[0])

    return planned_with_room(problem, costs, options, make)


def _few(problem: Problem, costs: Costs, options: Options, grains: tuple[int, ...] = CHUNKS_PER_RANK) -> Candidates:
    validate(problem, costs, options)
    candidates = Candidates(Replicas((problem,), costs, options))
    first = first_recipe(problem, options, candidates.orders, candidates.values["cut"][0])
    reaches = candidates.values["reach"][:2]
    cut = [first._replace(grain=float(grain)) for grain in (grains if options.slices is None else grains[:1])]
    recipes = [recipe._replace(reach=reach) for recipe in cut for reach in reaches]
    has_few = options.slices is None and len(problem.lengths) <= MOST_WHOLE_SEQUENCES
    if candidates.is_single and has_few and grains == CHUNKS_PER_RANK:
        recipes += [
            first._replace(grain=WHOLE, reach=reach, lead=lead)
            for reach, lead in (("slices", 1.0), *((r, 2.0) for r in reaches))
        ]
    for recipe in recipes:
        candidates.of(recipe, candidates.fastest_us)
    for recipe in cut if not candidates.fitting() else ():
        candidates.of(recipe._replace(lead=0.0))
    if not candidates.fitting():
        raise infeasible(problem, costs, options, candidates.least_cap_bytes)
    return candidates
