"""Refinement in OptPipe's manner (arXiv 2510.05186, see the package): run the greedy plan, and a better one when there is one.

What a solver finds in a given time depends on the machine, so use it where one process decides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from megatron_epp.contrib.exact.oracle import makespan_us, oracle
from megatron_epp.contrib.exact.queue import tell_greedy
from megatron_epp.cost import Costs
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.search.greedy import greedy
from megatron_epp.planner.search.overlapped import overlapped

logger = logging.getLogger(__name__)

TIME_LIMIT_S, REFINER_LIMIT_S = 10.0, 60.0
"""Seconds for a batch that is waited for, and for one that is refined in the background."""
MOST_CHUNKS = 16
"""Longer chunk tables keep the greedy decisions: their programs do not get anywhere in minutes."""


@dataclass(frozen=True, slots=True)
class Refined[D]:
    """Decisions of a batch after the oracle, or those of all replicas.

    Attributes:
        decisions: the best found.
        start_us, makespan_us: makespan before and after.
        bound_us: no decisions of the oracle's kind are faster; 0 where none is known: with overlapped exchanges,
            and where replicas in lockstep may offload.
    """

    decisions: D
    start_us: float
    makespan_us: float
    bound_us: float


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
        tell_greedy(why)
        return start
    return refined(start, problem, costs, options, TIME_LIMIT_S).decisions


def why_greedy(made: Decisions, problem: Problem) -> str:
    """Return why greedy decisions stay as they are; empty where the oracle can look for better ones.

    Args:
        made: by the greedy planner.
        problem: as for `milp`.
    """
    if problem.forward_only:
        return "it does not know evaluations"
    if len(made.chunks) > MOST_CHUNKS:
        return f"the plan has more than {MOST_CHUNKS} chunks, too many to get anywhere in minutes"
    return ""


def tell_gap(num_sequences: int, found: Refined[Any]) -> None:
    """Log how much faster a refined batch is, and how far above the bound."""
    logger.info(
        "refined a batch of %d sequences: %.3f ms, %.2f %% less than greedy's, %s",
        num_sequences,
        found.makespan_us / 1e3,
        100 * (1 - found.makespan_us / found.start_us),
        f"gap {100 * (found.makespan_us / found.bound_us - 1):.2f} %" if found.bound_us else "no bound is known",
    )


def refined(start: Decisions, problem: Problem, costs: Costs, options: Options, default_s: float) -> Refined[Decisions]:
    """Look for better decisions than the greedy ones.

    The oracle knows no steps of two actions: where exchanges are overlapped, neighbours in its order are joined afterwards.

    Args:
        start: the greedy decisions.
        problem, costs, options: as for `milp`.
        default_s: seconds where `options` name no limit.
    """
    # This raises where messages do not fit: `plan` then asks again, with room for them.
    start_us = build_plan(problem, costs, options, start).predicted.makespan_us
    limit_s = default_s if options.plan_limit_s is None else options.plan_limit_s
    single = greedy(problem, costs, replace(options, overlap_exchanges=False)) if start.joined else start
    if why_greedy(single, problem):
        return Refined(start, start_us, start_us, 0.0)
    found = oracle(single.chunks, problem, costs, options, start=single, time_limit_s=limit_s)
    if not options.overlap_exchanges:
        return Refined(found.decisions or start, start_us, min(found.makespan_us, start_us), found.bound_us)
    better = found.decisions or single
    choices = start, better, overlapped([better, start], problem, costs, options)
    times_us = [makespan_us(problem, costs, options, one) for one in choices]
    return Refined(choices[times_us.index(min(times_us))], start_us, min(times_us), 0.0)
