"""Planning against a deadline (`Options.budget_ms`): the local search gets the time that the search for a plan leaves.

The number of steps depends on the machine, so equal arguments may give different plans. Use it where one process decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_epp.cost import Costs
from megatron_epp.plan import Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.messages import planned_with_room
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.finishing import finisher_of
from megatron_epp.planner.search.greedy import Candidates, candidates, fastest, finished
from megatron_epp.planner.search.least import last_resort, last_resort_without_offload
from megatron_epp.planner.search.local import improve
from megatron_epp.planner.search.recent import Recent, Warm, canonical, relabelled
from megatron_epp.planner.search.replicas import Replicas

Clock = Callable[[], float]

FIRST_STEPS = 32
"""Steps of the first run of the local search; few, to time a step. Each further run takes twice as many while there is time."""
IDLE_S = 1e-6
"""Seconds below which a step counts as none: the search has proven the decisions, or cannot change them."""


@dataclass(frozen=True, slots=True)
class Known:
    """Best decisions known for a batch.

    Attributes:
        whole: the best with whole backwards, from which the local search goes on.
        best: the best of all, with weight gradients split off where that is asked for and faster.
    """

    whole: Decisions
    best: Decisions


def improved(
    made: Decisions, problem: Problem, costs: Costs, options: Options, deadline_s: float, clock: Clock = time.perf_counter
) -> Decisions:
    """Run the local search repeatedly, each time from the best so far and with another seed, until the deadline.

    Args:
        made: decisions with whole backwards that fit the caps.
        problem, costs, options: as `plan` takes them.
        deadline_s: time of the clock at which to end.
        clock: seconds.
    """
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


class Anytime:
    """Planner of successive batches with the greedy planner, each for `options.budget_ms`.

    Each batch serves the next: the search begins at the grain of a batch of like shape, and a batch of equal
    lengths goes on where it was left.
    """

    def __init__(self, costs: Costs, options: Options, clock: Clock = time.perf_counter) -> None:
        self.costs, self.options, self.clock = costs, options, clock
        self.warm, self.solved = Warm(), Recent[Problem, Known]()

    def plan(self, problem: Problem) -> Plan:
        """Plan one batch. Raises what `planner.plan` raises."""
        deadline_s = self.clock() + (self.options.budget_ms or 0) / 1000
        validate(problem, self.costs, self.options)

        def make(asked: Problem) -> Plan:
            # Caps above the given ones are planned only to name the least that would do, which takes no budget.
            return self._plan(asked, deadline_s if asked.cap_bytes == problem.cap_bytes else 0.0)

        def smaller(asked: Problem) -> Plan:
            small = Anytime(self.costs, replace(self.options, wide_windows=False), self.clock)
            return small._plan(asked, deadline_s if asked.cap_bytes == problem.cap_bytes else 0.0)

        least, without_offload = (
            resort(problem, self.costs, self.options) for resort in (last_resort, last_resort_without_offload)
        )
        return planned_with_room(problem, make, smaller, least, without_offload)

    def _plan(self, problem: Problem, deadline_s: float) -> Plan:
        asked, sequences = canonical(problem)
        known = self.solved.recall(asked) or self._started(asked)
        whole = improved(known.whole, asked, self.costs, self.options, deadline_s, self.clock)
        best = whole
        if Replicas((asked,), self.costs, self.options).splits_weight:
            best = fastest([self._split(Candidates([whole], []), asked), known.best], asked, self.costs)
        self.solved.remember(asked, Known(whole, best))
        if (improve_further := finisher_of(self.options)) is not None:
            best = improve_further([best, whole], asked, self.costs, self.options)
        return build_plan(problem, self.costs, self.options, relabelled(best, sequences))

    def _started(self, asked: Problem) -> Known:
        """Compute the decisions of one search without a budget."""
        found = candidates(asked, self.costs, self.options, self.warm)
        whole = finished(found, asked, self.costs, replace(self.options, budget_ms=None, split_weight=False))
        return Known(whole, self._split(found, asked) if Replicas((asked,), self.costs, self.options).splits_weight else whole)

    def _split(self, found: Candidates, asked: Problem) -> Decisions:
        """Split weight gradients off, without local search: the time is spent."""
        return finished(found, asked, self.costs, replace(self.options, steps=0, budget_ms=0))
