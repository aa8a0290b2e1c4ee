"""Planning: from the lengths of a batch to a plan."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name

from megatron_epp.cost.model import Costs
from megatron_epp.plan import UNLIMITED_BYTES, Plan
from megatron_epp.plan.planners import PLANNERS, PlannerEntry
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunk_tables import chunks_of
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.warm_up import OrderRule, WarmUp, elastic_1f1b
from megatron_epp.planner.tables import Tables, tabulate

__all__ = [
    "PLANNERS",
    "UNLIMITED_BYTES",
    "Decisions",
    "Options",
    "OrderRule",
    "Problem",
    "Tables",
    "WarmUp",
    "chunks_of",
    "elastic_1f1b",
    "plan",
    "slice_groups",
    "tabulate",
    "uncollected",
]


def plan(problem: Problem, costs: Costs, options: Options = Options(), names_cap: bool = True) -> Plan:  # noqa: B008 - frozen
    """Plan one iteration. Equal arguments give equal plans in every process, but for the planner "milp".

    Args:
        names_cap: a refusal names a cap under which there is a plan. With several stages per rank that takes many searches.

    Returns:
        a plan that `check` finds nothing wrong with, with the simulator's predictions.

    Raises:
        InfeasibleError: nothing fits the caps; the message names the smallest cap that would suffice, the remedies name the
            settings to change.
        PlanError: the arguments make no sense, there is no such planner, it fails, or (a bug in it) its plan does not pass
            `check`; then the message is the report.
    """
    make = resolve_name((PLANNERS.entry(options.planner) or PlannerEntry("")).plans)
    with uncollected():
        planned: Plan = make(problem, costs, options, names_cap)
    return planned


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend cyclic garbage collection: plans are many small tuples without cycles, and looking for cycles takes a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
