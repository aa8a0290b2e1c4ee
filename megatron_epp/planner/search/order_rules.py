"""Order rules that the search tries. A new rule (`orders.warm_up.OrderRule`) enters it with one line in one of these tuples."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_epp.planner.orders.list_scheduling import ListScheduling
from megatron_epp.planner.orders.warm_up import OneStagePerRank, OrderRule, WarmUp, elastic_1f1b
from megatron_epp.planner.problem import Problem

ELASTIC_1F1B = OneStagePerRank(elastic_1f1b)

FIRST: tuple[OrderRule, ...] = (WarmUp(lead=2, minimal=True), WarmUp(lead=2))
"""Rules that every grain is tried with."""
SECOND: tuple[OrderRule, ...] = (
    WarmUp(lead=1.5, minimal=True),
    WarmUp(lead=1, minimal=True),
    WarmUp(lead=1.5),
    WarmUp(lead=1),
    ELASTIC_1F1B,
)
"""Further rules for the best grain: less alive, less slack."""
HALF = WarmUp(lead=0.5, minimal=True)
LEAST: tuple[OrderRule, ...] = (WarmUp(lead=0, minimal=True),)
"""Rule of last resort, when no other fits: one sequence is alive at a time, and no order of a table keeps less."""
LIST_SCHEDULES: tuple[OrderRule, ...] = (ListScheduling(2), ListScheduling(1.5), ListScheduling(1), ListScheduling(3))
"""Rules for any other placement than one stage per rank in order, the first for every grain."""
LEAST_LISTED: tuple[OrderRule, ...] = (ListScheduling(0),)


@dataclass(frozen=True, slots=True)
class OrderRules:
    """Order rules for a placement.

    Attributes:
        first: for every grain.
        second: for the best grain, and in lockstep for all grains when none fits.
        least: when nothing else fits.
        frugal: with copies, where the best is far from what unlimited memory would give.
    """

    first: tuple[OrderRule, ...]
    second: tuple[OrderRule, ...]
    least: tuple[OrderRule, ...]
    frugal: tuple[OrderRule, ...]


ONE_STAGE_PER_RANK = OrderRules(FIRST, (*SECOND, HALF), LEAST, (*SECOND, HALF, *LEAST))
ANY_PLACEMENT = OrderRules(LIST_SCHEDULES[:1], LIST_SCHEDULES[1:], LEAST_LISTED, LIST_SCHEDULES[1:])


def rules_for(problem: Problem) -> OrderRules:
    """Return the rules for the problem's placement."""
    return ONE_STAGE_PER_RANK if problem.has_one_stage_per_rank else ANY_PLACEMENT
