"""Refinement of greedy plans by the oracle. What a solver finds in a given time depends on the machine."""

from __future__ import annotations

import logging
from dataclasses import replace

from megatron_epp.contrib.exact.oracle import makespan_us, oracle
from megatron_epp.contrib.overlap.pairing import overlapped
from megatron_epp.cost.model import Costs
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.result import greedy

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 10.0
"""Seconds of a solve."""
MOST_CHUNKS = 16
"""Longer chunk tables keep the greedy decisions: their programs do not get anywhere in minutes."""


def milp(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Improve the greedy decisions by the oracle, within a given time: order, recompute, weight gradients and copies.

    What `why_greedy` names stays as greedy plans it, and a log line says so.

    Args:
        problem, costs, options: as `planner.plan` takes them.

    Raises:
        InfeasibleError: the greedy planner finds nothing that fits the caps.
        MessageRoomError: its decisions fit but for their messages.
        PlanError: OR-tools is not installed.
    """
    start = greedy(problem, costs, options)
    if why := why_greedy(start, problem):
        logger.info("the plan is greedy's, the exact planner looks for no better one: %s", why)
        return start
    return refined(start, problem, costs, options)


def why_greedy(decisions: Decisions, problem: Problem) -> str:
    """Return why greedy decisions stay as they are; empty where the oracle can look for better ones. Arguments as in `milp`."""
    if problem.forward_only:
        return "it does not know evaluations"
    if len(decisions.chunks) > MOST_CHUNKS:
        return f"the plan has more than {MOST_CHUNKS} chunks, too many to get anywhere in minutes"
    return ""


def refined(start: Decisions, problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Look for better decisions than the greedy ones.

    The oracle knows no steps of two actions: where settings ask for them, they are made of its order.

    Args:
        problem, costs, options: as `planner.plan` takes them.
    """
    build_plan(problem, costs, options, start)  # raises where messages do not fit: `plan` then asks again, with room for them
    limit_s = TIME_LIMIT_S if options.plan_limit_s is None else options.plan_limit_s
    single = start if type(start) is Decisions else greedy(problem, costs, replace(options, overlap_exchanges=False))
    if why_greedy(single, problem):
        return start
    proven = oracle(single.chunks, problem, costs, options, start=single, time_limit_s=limit_s)
    if not options.overlap_exchanges:
        return proven.decisions or start
    better = proven.decisions or single
    choices = start, better, overlapped([better, start], problem, costs, options)
    return min(choices, key=lambda decisions: makespan_us(problem, costs, options, decisions))
