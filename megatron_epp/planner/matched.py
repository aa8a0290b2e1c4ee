"""Plans for replicas that share experts: made together, so that all run the same actions in the same order.

Each layer with experts is an exchange between the replicas, so an action takes as long as the slowest of them takes for it. One
order is made for all, by these times; every replica then has its own chunks in it, and its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_epp.cost import Costs
from megatron_epp.planner.alignment import Aligned, align
from megatron_epp.planner.assemble import Decisions, build_plan
from megatron_epp.planner.chunking import Chunker
from megatron_epp.planner.common_recompute import fit_alike
from megatron_epp.planner.evaluate import Layers, makespan_us
from megatron_epp.planner.listing import Listing
from megatron_epp.planner.order import Order, Schedule
from megatron_epp.planner.problem import WHOLE, Options, Problem, validate
from megatron_epp.planner.search import CHUNKS_PER_STAGE, FIRST, HALF, LEAST, LISTED, MOST_CHUNKS, PATIENCE, SECOND
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.planner.trials import infeasible
from megatron_epp.planner.weight import split_weights
from megatron_epp.schedule import InfeasibleError, Plan, PlanError
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
    layers: Layers
    makespan_us: float


class _Joint:
    """The search for a grain and an order, over all replicas at once."""

    def __init__(self, problems: tuple[Problem, ...], costs: Costs, options: Options) -> None:
        self.problems, self.costs, self.options = problems, costs, options
        self.chunkers = [Chunker.of(problem, costs, options.chunk_tokens) for problem in problems]
        known = options.levels(costs)
        self.levels = ALIKE if set(ALIKE) <= set(known) else WHOLE
        self.best: _Best | None = None
        self.least_cap = 0

    def plans(self) -> tuple[Plan, ...]:
        straight = self.problems[0].is_straight
        first: Sequence[Schedule | Listing] = FIRST if straight else LISTED[:1]
        second: Sequence[Schedule | Listing] = (*SECOND, HALF) if straight else LISTED[1:]
        least: Sequence[Schedule | Listing] = LEAST if straight else (Listing(0),)
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
        return tuple(self._finished())

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
            if isinstance(schedule, Listing):
                order = schedule.order(aligned.skeleton, tables[0])
            else:
                order = schedule(aligned.skeleton, self.problems[0].num_stages, self.problems[0].forward_only)
            fit = fit_alike(order, tables, self.problems[0].cap_bytes, self.options)
            if fit.layers is None:
                self.least_cap = int(min(self.least_cap or math.inf, fit.needed_bytes))
                continue
            took_us = makespan_us(order, tables[0], fit.layers)
            if self.best is None or took_us < self.best.makespan_us:
                self.best = _Best(aligned, tables, order, fit.layers, took_us)
        return self.best is not before

    def _finished(self) -> Iterator[Plan]:
        best, options = self.best, self.options
        if best is None and self.least_cap:
            raise infeasible(self.problems[0], self.least_cap)
        if best is None:
            fewest = min(sum(problem.lengths) for problem in self.problems)
            raise InfeasibleError(
                f"replicas that share experts need as many chunks each, and one that has {fewest} tokens in all has too few: "
                "raise --global-batch-size or --epp-chunk-tokens, or lower --epp-slices or --expert-model-parallel-size"
            )
        for problem, chunks, tables in zip(self.problems, best.aligned.chunks, best.tables, strict=True):
            order = best.order
            if options.split_weight and self.costs.splits_weight and not problem.forward_only:
                split = split_weights(order, tables, best.layers, problem.cap_bytes)
                if makespan_us(split, tables, best.layers) < best.makespan_us:
                    order = split
            yield build_plan(problem, self.costs, options, Decisions(chunks, order, best.layers), tables)


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
