"""Planning against a deadline (`Options.budget_ms`): the local search gets the time that the search for a plan leaves.

The number of steps depends on the machine, so equal arguments may give different plans. Use it where one process decides.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.chunks.chunker import longest_first
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.finishing import finisher_of
from megatron_epp.planner.local_search import improve
from megatron_epp.planner.messages import MessageRoomError
from megatron_epp.planner.orders.completion import completed
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import finished, plan_or_refuse, planned
from megatron_epp.planner.search import search

Clock = Callable[[], float]

FIRST_STEPS = 32
"""Steps of the first run of the local search; few, to time a step. Each further run takes twice as many while there is time."""
IDLE_S = 1e-6
"""Seconds below which a step counts as none: the search has proven the decisions, or cannot change them."""


@dataclass(slots=True)
class Recent[K, V]:
    """Cache that drops the least recently used entry."""

    capacity: int = 1024
    entries: OrderedDict[K, V] = field(default_factory=OrderedDict)

    def recall(self, key: K) -> V | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def remember(self, key: K, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


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

    A batch of equal lengths goes on where an earlier one was left, so a plan depends on the batches planned before.
    """

    def __init__(self, costs: Costs, options: Options, clock: Clock = time.perf_counter) -> None:
        self.costs, self.options, self.clock = costs, options, clock
        self.solved = Recent[Problem, Known]()

    def plan(self, problem: Problem) -> Plan:
        """Plan one batch. Raises what `planner.plan` raises."""
        deadline_s = self.clock() + (self.options.budget_ms or 0) / 1000
        validate(problem, self.costs, self.options)
        asked, sequences = canonical(problem)
        try:
            known = self.solved.recall(asked) or self._started(asked)
            whole = improved(known.whole, asked, self.costs, self.options, deadline_s, self.clock)
            best = min((known.best, self._completed(whole, asked)), key=lambda one: one.makespan_us(asked, self.costs))
            self.solved.remember(asked, Known(whole, best))
            if (improve_further := finisher_of(self.options)) is not None:
                best = improve_further([best, whole], asked, self.costs, self.options)
            return build_plan(problem, self.costs, self.options, relabelled(best, sequences))
        except (InfeasibleError, MessageRoomError):  # what fits, or would, is told without a budget
            return plan_or_refuse((problem,), self.costs, replace(self.options, budget_ms=None))[0]

    def _started(self, asked: Problem) -> Known:
        """Compute the decisions of one search without a budget."""
        candidates = search(Replicas((asked,), self.costs, replace(self.options, budget_ms=None)))
        if not candidates.fitting():
            planned(candidates)  # raises
        best = finished(candidates)
        return Known(best.whole[0], best.decisions[0])

    def _completed(self, whole: Decisions, asked: Problem) -> Decisions:
        """Insert the vocabulary's shards, and split weight gradients off, where that is asked for and faster."""
        replicas = Replicas((asked,), self.costs, self.options)
        if not (replicas.splits_weight or replicas.has_shards):
            return whole
        tables = whole.tables(asked, self.costs)
        order, _ = completed(whole.order, tables, whole.as_offload, asked.cap_bytes, replicas.splits_weight)
        return whole.reordered(order)


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Return the same batch with the longest sequence first, and the original index of each of its sequences."""
    sequences = tuple(longest_first(problem.lengths))
    return problem.part(sequences), sequences


def relabelled(made: Decisions, sequences: tuple[int, ...]) -> Decisions:
    """Renumber the sequences of a canonical batch's decisions as in the original batch."""
    chunks = (Chunk(tuple(s._replace(sequence=sequences[s.sequence]) for s in chunk.segments)) for chunk in made.chunks)
    kv_offload = frozenset((stage, sequences[sequence]) for stage, sequence in made.kv_offload)
    return replace(made, chunks=tuple(chunks), kv_offload=kv_offload)
