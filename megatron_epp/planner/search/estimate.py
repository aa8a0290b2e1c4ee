"""About how long a plan will take, for a small part of the time that planning takes."""

from __future__ import annotations

from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner import plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.chunks.whole import plainly
from megatron_epp.planner.memory.messages import planned_with_room
from megatron_epp.planner.orders.list_scheduling import Listing
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.greedy import FEW, FIRST, LEAST, LISTED
from megatron_epp.planner.search.trials import Trials

CHUNKS_PER_RANK = (12, 6, 3, 24)
"""Grains from coarse to fine, a middling one first."""


def estimate_us(problem: Problem, costs: Costs, options: Options) -> float:
    """The least makespan of a few plans that the search would try too. Equal arguments give equal estimates, in every process.

    It has the pipeline's fill and the recompute that the caps force.

    Raises:
        PlanError: the arguments make no sense.
        InfeasibleError: this plan fits no cap; another may.
    """
    return _few(problem, costs, options).best_us


def about_us(problem: Problem, costs: Costs, options: Options) -> float:
    """The estimate, or where that fits no cap the makespan of the plan. Raises what `plan` raises."""
    try:
        return estimate_us(problem, costs, options)
    except InfeasibleError:
        return plan(problem, costs, options).predicted.makespan_us


def rough_plan(problem: Problem, costs: Costs, options: Options) -> Plan:
    """The plan whose makespan `estimate_us` gives. Raises what it raises."""
    return planned_with_room(problem, lambda asked: build_plan(asked, costs, options, _few(asked, costs, options).result()))


def _few(problem: Problem, costs: Costs, options: Options) -> Trials:
    validate(problem, costs, options)
    chunker = Chunker.of(problem, costs, options.chunk_tokens).shapes[0]
    grains = [chunker.grain(chunks=count * problem.num_ranks) for count in CHUNKS_PER_RANK]
    if options.slices is not None:
        grains = [chunker.grain(slices=options.slices)]
    straight, tables = problem.is_straight, [chunker.table(grain) for grain in grains]
    trials = Trials(problem, costs, replace(options, steps=0))
    for table in tables:
        trials.better(table, FIRST if straight else LISTED[:1])
    if straight and options.slices is None and len(problem.lengths) <= FEW and max(problem.lengths) <= chunker.token_cap:
        trials.better(plainly(problem.lengths)[0], (elastic_1f1b, *FIRST))
    for table in tables if trials.best is None else ():
        trials.better(table, LEAST if straight else (Listing(0),))
    trials.result()
    return trials
