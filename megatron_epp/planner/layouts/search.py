"""The search for the layout with the least expected makespan: bounds first, then rough plans, then plans of the best few."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from megatron_epp.cost.library import even_layers
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.layout import Layout, layers_text
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import plan
from megatron_epp.planner.layouts.work import HALF, WHOLE, CostsOf, Work, moved
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.search.estimate import estimate_us, rough_plan

logger = logging.getLogger(__name__)

PLANNED = 3
"""Number of batches that are planned; the bounds are of all."""
WORTH = 0.005
"""Share of time that a layout must save to be chosen over a plainer one."""
FINALISTS = 2
"""Number of layouts with several stages per rank that are planned as in training."""
_MOVES = 12
"""Largest number of moves of layers from one layout."""
_TARGETS = 3
"""Number of ranks to which a move from the busiest one is tried, those with the least to do."""
_GAIN = 0.0005
"""Smallest share of time that a move must save."""
_ROUGH = 0.08
"""Share by which estimates may be above the plans of several stages per rank."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Input of the search: batches, costs, and what a layout may be.

    Attributes:
        problems: batches like those to come, of one replica each; their placement does not matter, their caps do.
        costs_of: the costs of the model's pipeline with a layout.
        num_layers: of the model.
        options: of the planner.
        halves: stages may begin inside a layer.
        placements: those that are tried, the one of even layers first; empty for all of `placements_of`.
        vocabulary: whether the output layer may be in shards over the ranks: both are tried, the first with even layers.
    """

    problems: tuple[Problem, ...]
    costs_of: CostsOf
    num_layers: int
    options: Options = field(default_factory=Options)
    halves: bool = True
    placements: tuple[Placement, ...] = ()
    vocabulary: tuple[bool, ...] = (False,)

    @property
    def num_ranks(self) -> int:
        return self.problems[0].num_ranks

    @property
    def tried(self) -> tuple[Placement, ...]:
        """Placements that are tried, the one of even layers first."""
        return self.placements or placements_of(self.num_ranks)

    @property
    def even(self) -> Layout:
        """Even layers, on one stage per rank unless another placement is asked for."""
        first = self.tried[0]
        layers = even_layers(self.num_layers, first.num_stages)
        return Layout.of_layers(layers, first, shards_vocabulary=self.vocabulary[0])


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen layout, and means over the planned batches.

    Attributes:
        layout: the chosen one.
        makespan_us: of its plans.
        bound_us: that no plan of the same chunks and layers beats.
        even_us: of plans with even layers; infinite if they do not fit.
    """

    layout: Layout
    makespan_us: float
    bound_us: float
    even_us: float

    @property
    def gain(self) -> float:
        """Share of time saved over even layers."""
        return 1 - self.makespan_us / self.even_us


def choose(sample: Sample) -> Choice:
    """Search for the layout with the least expected makespan under the caps.

    Equal samples give equal layouts. Whole layers and one stage per rank are preferred where more saves less than `WORTH`.

    Args:
        sample: batches, costs and what is allowed.

    Raises:
        InfeasibleError: no layout fits the caps; the message is that of even layers.
        EppError: there are more ranks than layers, or the costs or batches make no sense.
    """
    return _Search(sample, sample.even).choice()


class _Search:
    """State of one search: layouts that were estimated and planned so far, by mean makespans of the planned batches.

    Args:
        sample: batches, costs and what is allowed.
        even: the layout over which gains are computed.
    """

    def __init__(self, sample: Sample, even: Layout) -> None:
        self.sample, self.even = sample, even
        work = Work.of(sample.problems, sample.costs_of, halves=sample.halves)
        self.work = work
        self.batches = _typical(sample.problems, work.ranks_us(self.even).max(axis=0).tolist())
        self.floors = Work.of(self.batches, sample.costs_of, halves=sample.halves)
        self.options = replace(sample.options, budget_ms=None, planner=_without_clock(sample.options.planner))
        self.estimates: dict[Layout, float] = {}
        self.plans: dict[Layout, list[Plan] | None] = {}
        self.refusal: InfeasibleError | None = None

    def choice(self) -> Choice:
        plain, others = self._seeds()
        self._plan(self.even)
        logger.info("layout: %d candidates for %d batches", 1 + len(plain) + len(others), len(self.sample.problems))
        for layout in plain:
            self._plan(layout)
            self._plan(self._improved(layout))
        near = sorted((one for one in others if self._may_pay(one)), key=lambda one: (self._estimate(one), _plainness(one)))
        limit_us = self._least_us * (1 + _ROUGH)
        for layout in [one for one in near if self._estimate(one) <= limit_us][:FINALISTS]:
            self._plan(layout)
        logger.info("layout: %d layouts estimated, %d planned", len(self.estimates), len(self.plans))
        return self._best()

    def _best(self) -> Choice:
        """Return the plainest of the layouts whose plans are within `WORTH` of the fastest."""
        made = {layout: plans for layout, plans in self.plans.items() if plans is not None}
        if not made:
            assert self.refusal is not None  # even layers were planned first
            raise self.refusal
        close = [layout for layout in made if self._planned_us(layout) * (1 - WORTH) <= self._least_us]
        best = min(close, key=lambda one: (_plainness(one), one != self.even, self._planned_us(one), one.halves))
        bound_us = float(np.mean([each.predicted.lower_bound_us for each in made[best]]))
        found = Choice(best, self._planned_us(best), bound_us, self._planned_us(self.even))
        logger.info(
            "layout: stages of %s layers%s, %.1f ms expected, %.1f ms with even layers, bound %.1f ms",
            layers_text(best.halves),
            ", the vocabulary over all ranks" * best.shards_vocabulary,
            found.makespan_us / 1e3,
            found.even_us / 1e3,
            found.bound_us / 1e3,
        )
        return found

    def _seeds(self) -> tuple[list[Layout], list[Layout]]:
        """Layouts of levelled work in whole and half layers: with the placement of even layers, and with others."""
        found, steps = [], (WHOLE, HALF) if self.sample.halves else (WHOLE,)
        for placement, shards, step in product(self.sample.tried, self.sample.vocabulary, steps):
            if self.sample.num_layers * WHOLE // step >= placement.num_stages:
                found.append(self.work.spread(self.sample.num_layers, placement, step, shards_vocabulary=shards))
        found = [one for one in dict.fromkeys(found) if one != self.even]
        first = self.even.placement
        return [one for one in found if one.placement == first], [one for one in found if one.placement != first]

    def _improved(self, start: Layout) -> Layout:
        """Move layers away from the rank that is busy longest, recompute included, as long as estimates become less."""
        best, best_us, step = start, self._estimate(start), WHOLE if start.is_whole else HALF
        for _ in range(_MOVES):
            if best_us <= (1 + _GAIN) * self.floors.floor_us(best) or math.isinf(best_us):
                break
            order = self._by_business(best)
            others = moved(best, order[-1], step, order[:_TARGETS])
            found = [(self._estimate(one), one.halves) for one in others if self.floors.floor_us(one) < best_us]
            least_us, halves = min(found, default=(math.inf, best.halves))
            if least_us > (1 - _GAIN) * best_us:
                break
            best, best_us = replace(best, halves=halves), least_us
        return best

    def _may_pay(self, layout: Layout) -> bool:
        """True if the bound of a layout lets it be faster than all planned ones by `WORTH`."""
        return self.floors.floor_us(layout) <= self._least_us * (1 - WORTH)

    @property
    def _least_us(self) -> float:
        """Least makespan of all plans so far; infinite if nothing fits yet."""
        return min(map(self._planned_us, self.plans), default=math.inf)

    def _planned_us(self, layout: Layout) -> float:
        plans = self.plans[layout]
        return math.inf if plans is None else float(np.mean([each.predicted.makespan_us for each in plans]))

    def _estimate(self, layout: Layout) -> float:
        """Estimated makespan; infinite where no estimate fits the caps, though a plan may."""
        if layout not in self.estimates:
            costs = self.sample.costs_of(layout)
            try:
                times = [estimate_us(_placed(one, layout), costs, self.options) for one in self.batches]
            except InfeasibleError:
                times = [math.inf]
            self.estimates[layout] = float(np.mean(times))
        return self.estimates[layout]

    def _by_business(self, layout: Layout) -> list[int]:
        """Ranks from the one with the least to do to the busiest, in a rough plan of the batch that takes longest."""
        costs, problem = self.sample.costs_of(layout), _placed(self.batches[-1], layout)
        try:
            made = rough_plan(problem, costs, self.options)
        except InfeasibleError:
            made = plan(problem, costs, self.options)
        busy_us = [sum(step.time_us for step in steps) for steps in made.ranks]
        return sorted(range(len(busy_us)), key=lambda rank: (busy_us[rank], rank))

    def _plan(self, layout: Layout) -> None:
        """Plan as training would."""
        if layout not in self.plans:
            costs = self.sample.costs_of(layout)
            try:
                self.plans[layout] = [plan(_placed(one, layout), costs, self.options) for one in self.batches]
            except InfeasibleError as error:
                self.plans[layout] = None
                self.refusal = self.refusal or error


def fastest(layouts: Sequence[Layout], sample: Sample) -> Choice:
    """Plan a few layouts and return the fastest, or a plainer one that is slower by less than `WORTH`.

    Args:
        layouts: of the sample's model; at least one. Gains are over the first.
        sample: batches and costs; what it says of layouts does not matter.

    Raises:
        InfeasibleError: none fits the caps; the message is that of the first.
    """
    search = _Search(sample, layouts[0])
    for layout in layouts:
        search._plan(layout)
    return search._best()


def placements_of(num_ranks: int) -> tuple[Placement, ...]:
    """Placements that are tried, the plainest first."""
    if num_ranks == 1:
        return (Placement("looped", 1, 1),)
    looped = tuple(Placement("looped", num_ranks, count) for count in (1, 2, 4))
    return (*looped[:2], Placement("v", num_ranks, 2), *looped[2:])


def _placed(problem: Problem, layout: Layout) -> Problem:
    return replace(problem, placement=layout.placement.rank_of)


def _plainness(layout: Layout) -> tuple[int, bool, bool, bool]:
    """Sort key: few stages per rank, looped, the vocabulary on the last stage, whole layers first."""
    placement = layout.placement
    return placement.num_chunks, not placement.is_looped, layout.shards_vocabulary, not layout.is_whole


def _typical(problems: Sequence[Problem], times_us: Sequence[float]) -> tuple[Problem, ...]:
    """Return `PLANNED` batches from the middles of equal parts of all, by the time that they take."""
    order = sorted(range(len(problems)), key=lambda at: (times_us[at], at))
    count = min(PLANNED, len(order))
    return tuple(problems[order[(2 * part + 1) * len(order) // (2 * count)]] for part in range(count))


def _without_clock(planner: str) -> str:
    """Return the planner, or for one whose plans depend on the clock the one by which it begins."""
    return "greedy" if planner == "milp" else planner
