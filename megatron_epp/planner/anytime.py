"""Planning against a deadline (--epp-plan-budget-ms): what the search for a plan leaves of it goes to the local search.

The number of steps depends on the machine, so equal arguments may give different plans. Use it where one process decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.planner.assemble import Decisions, build_plan
from megatron_epp.planner.improve import improve
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search import finished, greedy, predicted_us
from megatron_epp.planner.solved import Solved, canonical, relabelled
from megatron_epp.planner.warm import Warm
from megatron_epp.schedule import Plan

Clock = Callable[[], float]

FIRST_STEPS = 32
"""Of the first run of the local search. Every further run takes twice as many, as long as there is time."""
IDLE_S = 1e-6
"""A step that takes less was none: the search has proven the decisions, or cannot change them."""


def start_of(problem: Problem, costs: Costs, options: Options, warm: Warm | None) -> Decisions:
    """What there is to improve: what there would be without a budget, with whole backwards. Raises what `greedy` raises."""
    return greedy(problem, costs, replace(options, budget_ms=None, split_weight=False), warm)


def improved(
    made: Decisions, problem: Problem, costs: Costs, options: Options, deadline_s: float, clock: Clock = time.perf_counter
) -> Decisions:
    """Run the local search again and again, each time from the best so far and with another seed, until the deadline."""
    tables = made.tables(problem, costs)
    steps, seed, now_s = FIRST_STEPS, options.seed, clock()
    while steps and now_s < deadline_s:
        made = improve(made, tables, problem, replace(options, steps=steps, seed=seed))
        before_s, now_s = now_s, clock()
        step_s = (now_s - before_s) / steps
        if step_s < IDLE_S:
            break
        steps, seed = min(2 * steps, int((deadline_s - now_s) / step_s)), seed + 1
    return made


def completed(made: Decisions, problem: Problem, costs: Costs, options: Options, warm: Warm | None) -> Decisions:
    """Decisions with their weight gradients split off where that is asked for; never slower than without a budget."""
    if not options.split_weight:
        return made
    counted = replace(options, steps=0, budget_ms=0)
    choices = finished(made, problem, costs, counted), greedy(problem, costs, counted, warm)
    return min(choices, key=lambda one: predicted_us(one, problem, costs))


class Anytime:
    """Plans one batch after the other with the greedy planner, each for `options.budget_ms`. What it learns serves the next:

    the search begins at the grain of a batch of like shape, and a batch of equal lengths goes on where it was left.
    """

    def __init__(self, costs: Costs, options: Options, clock: Clock = time.perf_counter) -> None:
        self.costs, self.options, self.clock = costs, options, clock
        self.warm, self.solved = Warm(), Solved()

    def plan(self, problem: Problem) -> Plan:
        """Raises what `planner.plan` raises."""
        deadline_s = self.clock() + (self.options.budget_ms or 0) / 1000
        validate(problem, self.costs, self.options)
        asked, sequences = canonical(problem)
        start = self.solved.recall(asked) or start_of(asked, self.costs, self.options, self.warm)
        made = improved(start, asked, self.costs, self.options, deadline_s, self.clock)
        self.solved.remember(asked, made)
        made = completed(made, asked, self.costs, self.options, self.warm)
        return build_plan(problem, self.costs, self.options, relabelled(made, sequences))
