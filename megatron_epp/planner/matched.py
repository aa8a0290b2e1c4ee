"""Plans for replicas that share experts: made together, so that all run the same actions in the same order.

Each layer with experts is an exchange between the replicas, so an action takes as long as the slowest of them takes for it. One
order is made for all, by these times; every replica then has its own chunks in it, its own memory, and its own copies to the
host, of which none keeps an action waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from megatron_epp.cost import Costs
from megatron_epp.planner.alignment import Aligned, align
from megatron_epp.planner.assemble import Decisions, build_plan
from megatron_epp.planner.chunking import Chunker
from megatron_epp.planner.common_recompute import fit_alike
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.listing import Listing
from megatron_epp.planner.offload import Offload, fit_offload
from megatron_epp.planner.order import Order, Schedule
from megatron_epp.planner.problem import WHOLE, Options, Problem, validate
from megatron_epp.planner.search import CHUNKS_PER_STAGE, FAR, FIRST, HALF, LEAST, LISTED, MOST_CHUNKS, PATIENCE, SECOND
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.planner.trials import WORTH, infeasible
from megatron_epp.planner.weight import weights_apart
from megatron_epp.schedule import UNLIMITED_BYTES, InfeasibleError, Plan, PlanError
from megatron_epp.schedule.check_matched import check_matched

ALIKE = ("linear", "whole")
"""Levels of recompute that all replicas' chunks climb in this order, so that equal steps are equal recompute."""
_TIMES = ("forward_us", "backward_us", "weight_us", "hops")


def plan_matched(problems: Sequence[Problem], costs: Costs, options: Options) -> tuple[Plan, ...]:
    """Plan one iteration of replicas that share experts. Equal arguments give equal plans, in every process.

    Args:
        problems: one for each replica, equal but for their lengths.
        costs: of every replica's pipeline.
        options: what the user fixed. The planner must be "greedy", without a budget.

    Returns:
        A plan for each, sound by itself, that `check_matched` finds nothing wrong with. The time of an action is that of the
        slowest replica.

    Raises:
        InfeasibleError: nothing fits the caps, or one replica has too few tokens for the chunks that another needs.
        PlanError: the arguments make no sense, or (a bug) the plans do not pass the checks.
    """
    for problem in problems:
        validate(problem, costs, options)
    if options.planner != "greedy" or options.budget_ms:
        raise PlanError("replicas that share experts are planned with --epp-planner greedy, without --epp-plan-budget-ms")
    plans = _Joint(tuple(problems), costs, options).plans()
    if faults := check_matched(plans):
        raise PlanError("plans of replicas that share experts do not match: " + "; ".join(map(str, faults[:3])))
    return plans


_Grain = dict[str, Any]
"""What `Chunker.grain` takes."""


@dataclass(frozen=True, slots=True)
class _Best:
    aligned: Aligned
    tables: tuple[Tables, ...]
    order: Order
    made: tuple[Offload, ...]
    makespan_us: float


class _Joint:
    """The search for a grain and an order, over all replicas at once."""

    def __init__(self, problems: tuple[Problem, ...], costs: Costs, options: Options) -> None:
        self.problems, self.costs, self.options = problems, costs, options
        self.chunkers = [Chunker.of(problem, costs, options.chunk_tokens) for problem in problems]
        known = options.levels(costs)
        self.levels = ALIKE if set(ALIKE) <= set(known) else WHOLE
        self.best: _Best | None = None
        self.least_cap = self.least_host = 0

    def plans(self) -> tuple[Plan, ...]:
        self.search()
        can_copy = math.isfinite(self.costs.host_us(1)) and not self.problems[0].forward_only
        if self.options.offload and self.options.recompute == "auto" and can_copy:
            self._search_copies()
        return tuple(self._finished())

    def _schedules(self) -> tuple[Sequence[Schedule | Listing], ...]:
        """What is tried first, what then, and what where nothing else fits."""
        return (FIRST, (*SECOND, HALF), LEAST) if self.problems[0].is_straight else (LISTED[:1], LISTED[1:], (Listing(0),))

    def search(self) -> None:
        """Try grains and schedules, without copies."""
        first, second, least = self._schedules()
        walks, coarser = self._walks()
        for walk in walks:
            worse = 0
            for grain in walk:
                worse = 0 if self._try(self._aligned(grain), first) else worse + 1
                if worse == PATIENCE:
                    break
        if self.best is not None:
            self._try(self.best.aligned, second)
        for grain in () if self.best is not None else (*(grain for walk in walks for grain in walk), *coarser):
            if self._try(self._aligned(grain), (*second, *least)) and grain in coarser:
                break

    def _search_copies(self) -> None:
        """Try offload with the chunks and orders that would be best if memory did not matter, and with the best so far."""
        roomy = [replace(problem, cap_bytes=(UNLIMITED_BYTES,) * problem.num_ranks) for problem in self.problems]
        (free := _Joint(tuple(roomy), self.costs, self.options)).search()
        so_far = math.inf if self.best is None else self.best.makespan_us
        if free.best is None or free.best.makespan_us >= WORTH * so_far:
            return
        one, (first, *others) = self.problems[0], self._schedules()
        schedules = first if free.best.makespan_us >= FAR * so_far else list(chain(first, *others))
        for known in [free.best] if self.best is None else [free.best, self.best]:
            orders = [known.order, *(self._order(known.aligned, known.tables, schedule) for schedule in schedules)]
            for order in dict.fromkeys(orders):
                rooms = [[problem.host_cap_bytes] * problem.num_ranks for problem in self.problems]
                found = fit_offload(order, known.tables, one.cap_bytes, rooms)
                if found is not None and found.short_bytes:
                    self.least_host = int(min(self.least_host or math.inf, one.host_cap_bytes + found.short_bytes))
                elif found is not None and (self.best is None or found.makespan_us < self.best.makespan_us):
                    self.best = _Best(known.aligned, known.tables, order, found.made, found.makespan_us)

    def _walks(self) -> tuple[list[list[_Grain]], list[_Grain]]:
        """Chunks in all to aim at: from a middling number to more, and to fewer. With slices given there is one grain. And
        coarser ones, for where a replica has too few tokens for these.
        """
        slices, ranks = self.options.slices, self.problems[0].num_ranks
        if slices is not None:
            return [[{"slices": slices}]], [{"slices": fewer} for fewer in range(slices - 1, 0, -1)]
        counts: list[_Grain] = [{"chunks": ranks * share} for share in CHUNKS_PER_STAGE if ranks * share <= MOST_CHUNKS]
        start = min(CHUNKS_PER_STAGE.index(12), len(counts) - 1)
        return [counts[start:], counts[:start][::-1]], [{"chunks": fewer} for fewer in range(ranks - 1, 0, -1)] or counts[:1]

    def _aligned(self, grain: _Grain) -> Aligned | None:
        return align([chunker.table(chunker.grain(**grain)) for chunker in self.chunkers], self.chunkers)

    def _try(self, aligned: Aligned | None, schedules: Sequence[Schedule | Listing]) -> bool:
        """Whether one of the schedules is faster than all before."""
        if aligned is None:
            return False
        every = zip(aligned.chunks, self.problems, strict=True)
        tables = in_step([tabulate(*each, self.costs, self.levels, in_order=True) for each in every])
        before = self.best
        for schedule in schedules:
            order = self._order(aligned, tables, schedule)
            fit = fit_alike(order, tables, [problem.cap_bytes for problem in self.problems], self.options)
            if fit.layers is None:
                self.least_cap = int(min(self.least_cap or math.inf, fit.needed_bytes))
                continue
            took_us = makespan_us(order, tables[0], fit.layers)
            if self.best is None or took_us < self.best.makespan_us:
                self.best = _Best(aligned, tables, order, (Offload(fit.layers, (), ()),) * len(tables), took_us)
        return self.best is not before

    def _order(self, aligned: Aligned, tables: Sequence[Tables], schedule: Schedule | Listing) -> Order:
        if isinstance(schedule, Listing):
            return schedule.order(aligned.skeleton, tables[0])
        return schedule(aligned.skeleton, self.problems[0].num_stages, self.problems[0].forward_only)

    def _finished(self) -> Iterator[Plan]:
        best, options = self.best, self.options
        if best is None and self.least_cap:
            raise infeasible(self.problems[0], self.least_cap, self.least_host)
        if best is None:
            fewest = min(sum(problem.lengths) for problem in self.problems)
            raise InfeasibleError(
                f"replicas that share experts need as many chunks each, and one that has {fewest} tokens in all has too few: "
                "raise --global-batch-size or --epp-chunk-tokens, or lower --epp-slices or --expert-model-parallel-size"
            )
        for problem, chunks, tables, made in zip(self.problems, best.aligned.chunks, best.tables, best.made, strict=True):
            order = best.order
            if options.split_weight and self.costs.splits_weight and not problem.forward_only:
                order = weights_apart(order, tables, made, problem.cap_bytes)
            decided = Decisions(chunks, order, made.layers, copies=made.copies, offload=made.shares)
            yield build_plan(problem, self.costs, options, decided, tables)


def in_step(tables: Sequence[Tables]) -> tuple[Tables, ...]:
    """Every replica's tables with the times of the slowest at each stage and chunk."""
    common = {name: np.max([getattr(own, name) for own in tables], axis=0).tolist() for name in _TIMES}
    message_us = np.max([own.message_us for own in tables], axis=0).tolist()
    again_us = [
        np.max([rung.layer_us for rung in rungs], axis=0).tolist() for rungs in zip(*(own.rungs for own in tables), strict=True)
    ]
    return tuple(
        replace(
            own,
            **common,
            message_us=message_us,
            rungs=tuple(replace(rung, layer_us=time_us) for rung, time_us in zip(own.rungs, again_us, strict=True)),
        )
        for own in tables
    )
