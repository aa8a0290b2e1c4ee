"""Programs of the ranks in the tests of agreement on a script's microbatches and their plan."""

from dataclasses import replace

from megatron_epp.mcore.microbatches.planning import Found, agree_on_plan, agree_on_shapes, plan_as_given, plan_microbatches
from megatron_epp.mcore.microbatches.source import Microbatch
from megatron_epp.plan import EppError, PlanError, to_json
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from tests.support.plan.planner_cases import pipeline

SHAPES = (Microbatch((16, 8)), Microbatch((32,)), Microbatch((8, 8), 2), Microbatch((400,)))
PROBLEM = Problem((), (0, 1), (UNLIMITED_BYTES,) * 2)
COSTS = pipeline(2, 2)


def shapes(rank, links, mine, problems=("", ""), num_bytes=(0, 0), replicas=(0, 0)):
    """Return what the ranks agree on, or the error of this rank."""
    try:
        return agree_on_shapes(Found(mine[rank], problems[rank], rank, num_bytes[rank], replicas[rank]), links.control)
    except EppError as error:
        return f"refused: {error}"


def plans(rank, links, makes):
    """The plan and order agreed on, where ranks make plans in the ways named by `makes`; or the error of this rank."""

    def make():
        way = makes[rank]
        if way == "fails":
            raise PlanError("no plan")
        if way == "breaks":
            raise ZeroDivisionError("a bug")
        made = plan_microbatches if way == "best" else plan_as_given
        return made(SHAPES, replace(PROBLEM), COSTS, Options())

    try:
        plan, order = agree_on_plan(make, links.control)
    except EppError as error:
        return f"refused: {error}"
    return to_json(plan), order
