"""Planning against a deadline (`Options.budget_ms`): the local search gets the time that the search for a plan leaves.

The number of steps depends on the machine, so equal arguments may give different plans. Use it where one process decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from megatron_epp.cost import Costs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.local_search import improve
from megatron_epp.planner.message_room import MessageRoomError
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import completed, finished, finisher_of, plan_or_refuse, planned
from megatron_epp.planner.search import search

Clock = Callable[[], float]

FIRST_STEPS = 32
"""Steps of the first run of the local search; few, to time a step. Each further run takes twice as many while there is time."""
IDLE_S = 1e-6
"""Seconds below which a step counts as none: the search has proven the decisions, or cannot change them."""


def improved(
    decisions: Decisions, problem: Problem, costs: Costs, options: Options, deadline_s: float, clock: Clock = time.perf_counter
) -> Decisions:
    """Run the local search repeatedly, each time from the best so far and with another seed, until the deadline.

    Args:
        deadline_s: time of the clock at which to end.
        clock: seconds.
    """
    tables = decisions.tables(problem, costs)
    steps, seed, now_s = FIRST_STEPS, options.seed, clock()
    while steps and now_s < deadline_s:
        decisions = improve(decisions, tables, problem, replace(options, steps=steps, seed=seed))
        before_s, now_s = now_s, clock()
        step_s = (now_s - before_s) / steps
        if step_s < IDLE_S:
            break
        steps, seed = min(2 * steps, int((deadline_s - now_s) / step_s)), seed + 1
    return decisions


def plan_within_budget(problem: Problem, costs: Costs, options: Options, clock: Clock = time.perf_counter) -> Plan:
    """Plan one batch by `greedy` in `options.budget_ms`. Raises what `planner.plan` raises."""
    deadline_s = clock() + (options.budget_ms or 0) / 1000
    steady = replace(options, budget_ms=None)
    candidates = search(Replicas((problem,), costs, steady))
    try:
        if not candidates.fitting():
            planned(candidates)  # raises
        start = finished(candidates)
        whole = improved(start.whole[0], problem, costs, options, deadline_s, clock)
        best = start.decisions[0]
        if whole is not start.whole[0]:
            best = min(start, completed(candidates, start, whole), key=attrgetter("key")).decisions[0]
        if (improve_further := finisher_of(options)) is not None:
            best = improve_further([best, whole], problem, costs, options)
        return build_plan(problem, costs, options, best)
    except (InfeasibleError, MessageRoomError):  # what fits, or would, is told without a budget
        return plan_or_refuse((problem,), costs, steady)[0]
