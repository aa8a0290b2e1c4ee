"""The search for the layout with the least expected makespan: bounds first, then rough plans, then plans of the best few;
and the defaults that go with it: output layer over the ranks, split weight gradients, logits at once. A training, the commands
and the benchmarks of public figures all choose by `settle`, so that what these say is what a run gets.

AdaPtis (arXiv 2509.23722: its performance model, and its pipeline generator, Algorithm 1) makes the same choices together.

Kept: layers of the stages (partition), ranks of the stages (placement) and order, with or without split weight gradients, are
chosen together, from costs of layers that add up to stages and ranks, by simulated makespans under the memory caps; layers move
away from the rank that is busy longest as long as that helps.

Changed: AdaPtis begins with a known pipeline and changes one of the three where its bubbles are. Here the work of the ranks
bounds every placement, layers are levelled for each, and the default planner, which orders, recomputes and copies, plans the
best few. Stages are looped or in a V (`placements_of`), not on any rank. Batches of a sample of unequal sequences stand in
place of equal microbatches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.layout import Layout, even_layers, layers_text
from megatron_epp.plan.placement import Placement, placements_of
from megatron_epp.plan.planners import begins_with_greedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner import plan
from megatron_epp.planner.least import may_fit
from megatron_epp.port.run_facts import LayoutAnswer
from megatron_epp.tools.layouts.estimates import Estimates
from megatron_epp.tools.layouts.rank_work import CostsOf, LayerWork, moved

logger = logging.getLogger(__name__)
plan_once = lru_cache(maxsize=16)(plan)
"""`plan`, which remembers what it has planned: a command's plan is often one of those that chose its layout."""

PLANNED_BATCHES = 3
"""Number of batches that are planned; the bounds are of all. With eight, in 18 runs of `scripts.bench.defaults`, plans of other
batches were up to 4 % slower and up to 3 % faster, and no faster in the mean.
"""
MIN_GAIN_SHARE = 0.01
"""Share of time that a layout must save to be chosen over a plainer one. Less would hardly show in a run: in trainings on two
cores, measured ratios of layouts were 1 to 12 % off the planned ones.
"""
MIN_GAIN_OF_SEVERAL_SHARE = 0.03
"""The same for several stages on a rank, over one: their messages and launches were not yet measured on several GPUs."""
MOST_LAYOUTS_PLANNED = 2
"""Number of layouts with several stages per rank that are planned as in training. Not measured: each costs a plan of one batch.
"""
_MOST_MOVES = 12
"""Largest number of moves of layers from one layout. Not measured: a limit of time; moves that gain too little end before."""
_TARGET_RANKS = 3
"""Number of ranks, with the least to do, to which a move from the busiest one is tried. Not measured: each costs an estimate.
"""
_MOVE_GAIN_SHARE = 0.0005
"""Smallest share of time that a move must save: a tenth of `MIN_GAIN_SHARE`, to which small moves can add up. Not measured."""
_CLEARLY_SLOWER_SHARE = 0.02
"""Share by which an estimate must be above another of the same placement for its layout not to be planned. Not measured: with
less the best may be passed over for an estimate's error, with more there are more plans.
"""
_ESTIMATE_EXCESS_SHARE = 0.08
"""Share by which estimates may be above the plans of several stages per rank, which try more rules. Not measured."""
_BATCH_ERROR_SHARE = 0.02
"""Share of time by which what a layout saves in one batch may be below what it saves in all: up to 0.006 in seven searches, but
0.026 of 0.043 in one of `scripts.bench.defaults`, where 0.005 took the plainer layout. More makes searches longer.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Input of the search: batches, costs, and what a layout may be."""

    # Typical batches of the run, of one replica each; their placement does not matter, their caps do
    problems: tuple[Problem, ...]
    costs_of: CostsOf  # the costs of the model's pipeline with a layout
    num_layers: int  # of the model
    options: Options = field(default_factory=Options)  # of the planner
    placements: tuple[Placement, ...] = ()  # placements to try, the one of even layers first; empty for all of `placements_of`
    # Whether the output layer may be in shards over the ranks: both are tried, the first with even layers
    vocabulary: tuple[bool, ...] = (False,)

    @property
    def num_ranks(self) -> int:
        return self.problems[0].num_ranks

    @property
    def tried(self) -> tuple[Placement, ...]:
        return self.placements or placements_of(self.num_ranks)

    @property
    def even(self) -> Layout:
        """Even layers, on one stage per rank unless another placement is asked for."""
        first = self.tried[0]
        return Layout(even_layers(self.num_layers, first.num_stages), first, self.vocabulary[0])


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The chosen layout, and means over the planned batches."""

    layout: Layout  # the chosen one
    makespan_us: float  # of its plans
    bound_us: float  # that no plan of the same chunks and layers beats
    even_us: float  # of plans with even layers; infinite if they do not fit
    batch: Problem  # the planned one that takes neither least nor longest, placed as the layout is
    batch_us: float  # makespan of its plan

    @property
    def gain(self) -> float:
        """Share of time saved over even layers."""
        return 1 - self.makespan_us / self.even_us


def choose(sample: Sample) -> LayoutChoice:
    """Search for the layout with the least expected makespan under the caps; equal samples give equal layouts.

    One stage per rank is preferred where more saves less than `MIN_GAIN_SHARE`. Raises `InfeasibleError`,
    about even layers, if no layout fits the caps, and `EppError` if there are more ranks than layers.
    """
    return _Search(sample, sample.even).choice()


class _Search:
    """State of one search: estimates and plans of layouts so far. Gains are over the layout `even`."""

    def __init__(self, sample: Sample, even: Layout) -> None:
        self.sample, self.even = sample, even
        self.work = LayerWork.of(sample.problems, sample.costs_of)
        self.batches = _typical(sample.problems, self.work.ranks_us(self.even).max(axis=0).tolist())
        self.floors = LayerWork.of(self.batches, sample.costs_of)
        self.options = _steady(sample.options)
        self.estimates = Estimates(self.batches, sample.costs_of, self.options, self.floors)
        self.plans: dict[Layout, dict[int, Plan | None]] = {}  # by the batch's number; None where nothing fits
        self.refusal: InfeasibleError | None = None

    def choice(self) -> LayoutChoice:
        plain, others = self._seeds()
        logger.info("layout: %d candidates for %d batches", 1 + len(plain) + len(others), len(self.sample.problems))
        self.plan(self.even)
        plain = list(dict.fromkeys((*plain, *map(self._improved, plain))))
        limit_us = min(map(self.estimates.mean_us, plain), default=math.inf) * (1 + _CLEARLY_SLOWER_SHARE)
        for layout in plain:
            if self.estimates.mean_us(layout) <= limit_us:
                self.plan(layout)
        self._race(self._nearest(self._alike(others, (self.even, *plain))))
        return self.best()

    def plan(self, layout: Layout) -> None:
        """Plan all batches as training would, until one does not fit."""
        for number in range(len(self.batches)):
            if math.isinf(self._plan_us(layout, number)):
                break

    def best(self) -> LayoutChoice:
        """Return the plainest of the fastest layouts (`_plainest`); several stages must gain `MIN_GAIN_OF_SEVERAL_SHARE`."""
        if not (planned := self._planned):
            assert self.refusal is not None  # even layers were planned first
            raise self.refusal
        best = self._plainest(planned)
        if single := [layout for layout in planned if layout.placement.num_chunks == 1]:
            plainer = self._plainest(single)
            if self._planned_us(best) > self._planned_us(plainer) * (1 - MIN_GAIN_OF_SEVERAL_SHARE):
                best = plainer
        bound_us = float(np.mean([each.predicted.lower_bound_us for each in self.plans[best].values() if each]))
        middle_us = self._plan_us(best, self._middle)
        batch = replace(self.batches[self._middle], placement=best.placement.rank_of)
        choice = LayoutChoice(best, self._planned_us(best), bound_us, self._planned_us(self.even), batch, middle_us)
        text = layers_text(best.layers) + " layers" + ", the vocabulary over all ranks" * best.shards_vocabulary
        times_ms = choice.makespan_us / 1e3, choice.even_us / 1e3, choice.bound_us / 1e3
        logger.debug("layout: stages of %s, %.1f ms expected, %.1f ms with even layers, bound %.1f ms", text, *times_ms)
        return choice

    def _plainest(self, planned: Sequence[Layout]) -> Layout:
        """Return the plainest of the layouts whose plans are within `MIN_GAIN_SHARE` of the fastest."""
        least_us = min(map(self._planned_us, planned))
        close = [layout for layout in planned if self._planned_us(layout) * (1 - MIN_GAIN_SHARE) <= least_us]
        return min(close, key=lambda layout: (_plainness(layout), layout != self.even, self._planned_us(layout), layout.layers))

    def _seeds(self) -> tuple[list[Layout], list[Layout]]:
        """Layouts of levelled work: with the placement of even layers, and with others."""
        seeds = []
        for placement, shards in product(self.sample.tried, self.sample.vocabulary):
            if self.sample.num_layers >= placement.num_stages:
                seeds.append(self.work.spread(self.sample.num_layers, placement, shards_vocabulary=shards))
        seeds = [layout for layout in dict.fromkeys(seeds) if layout != self.even]
        same = [layout for layout in seeds if layout.placement == self.even.placement]
        return same, [layout for layout in seeds if layout.placement != self.even.placement]

    def _improved(self, start: Layout) -> Layout:
        """Move layers away from the rank that is busy longest as long as estimates, with the start's chunks, become less."""
        best, best_us = start, self.estimates.mean_us(start)
        if math.isinf(best_us):
            return start
        grains = self.estimates.grains(start)
        for _ in range(_MOST_MOVES):
            if best_us <= (1 + _MOVE_GAIN_SHARE) * self.floors.floor_us(best):
                break
            order, enough_us = self.estimates.by_business(best, grains), (1 - _MOVE_GAIN_SHARE) * best_us
            layouts = moved(best, order[-1], order[:_TARGET_RANKS])
            estimated = ((self.estimates.mean_like_us(layout, grains, enough_us), layout.layers) for layout in layouts)
            least_us, layers = min(estimated, default=(math.inf, best.layers))
            if least_us > enough_us:
                break
            best, best_us = replace(best, layers=layers), least_us
        return best

    def _alike(self, others: list[Layout], plain: Sequence[Layout]) -> list[Layout]:
        """Return the layouts of other placements whose kind of stages is not clearly slower where even layers are placed.

        Several stages hardly change whether shards pay. Estimates of all kinds took a third of the search with 80 layers on 16
        ranks, and none of a kind that was slower came to be planned in seven.
        """
        times_us: dict[bool, float] = {}
        for layout in plain:
            kind = layout.shards_vocabulary
            times_us[kind] = min(times_us.get(kind, math.inf), self.estimates.mean_us(layout))
        limit_us = min(times_us.values()) * (1 + _ESTIMATE_EXCESS_SHARE)
        return [layout for layout in others if times_us.get(layout.shards_vocabulary, math.inf) <= limit_us]

    def _nearest(self, others: list[Layout]) -> list[Layout]:
        """Return layouts of other placements to plan: estimated for one batch, and the better half for all."""
        rival = self._rival
        rival_us = math.inf if rival is None else self._planned_us(rival)
        hopeful = [layout for layout in others if self.floors.floor_us(layout) <= self._enough_us(layout, rival_us)]
        hopeful.sort(key=lambda layout: (self.estimates.batch_us(layout, self._middle), _plainness(layout)))
        better = hopeful[: -(-len(hopeful) // 2)]
        better.sort(key=lambda layout: (self.estimates.mean_us(layout), _plainness(layout)))
        excess = 1 + _ESTIMATE_EXCESS_SHARE
        near = [layout for layout in better if self.estimates.mean_us(layout) <= self._enough_us(layout, rival_us) * excess]
        return near[:MOST_LAYOUTS_PLANNED]

    def _race(self, layouts: list[Layout]) -> None:
        """Plan one batch with every layout, and others with the fastest while it saves enough over the best so far."""
        rival = self._rival
        first = min(layouts, key=lambda layout: self._plan_us(layout, self._middle), default=None)
        if first is None:
            return
        took_us = rival_us = 0.0
        for number in sorted(range(len(self.batches)), key=lambda number: number != self._middle):
            took_us += self._plan_us(first, number)
            rival_us += math.inf if rival is None else self._plan_us(rival, number)
            if math.isinf(took_us) or took_us > self._enough_us(first, rival_us) + _BATCH_ERROR_SHARE * rival_us:
                break

    def _enough_us(self, layout: Layout, least_us: float) -> float:
        """Return the makespan at which a layout of another placement than even layers' is taken in place of the best so far."""
        over_one = layout.placement.num_chunks > 1 == self.even.placement.num_chunks
        return least_us * (1 - (MIN_GAIN_OF_SEVERAL_SHARE if over_one else MIN_GAIN_SHARE))

    @property
    def _middle(self) -> int:
        """Number of the batch that takes neither least nor longest."""
        return len(self.batches) // 2

    @property
    def _rival(self) -> Layout | None:
        """The layout that is the best so far; None if nothing fits yet."""
        return self._plainest(planned) if (planned := self._planned) else None

    @property
    def _planned(self) -> list[Layout]:
        """Layouts with which all batches have been planned, and fit."""
        return [layout for layout in self.plans if math.isfinite(self._planned_us(layout))]

    def _planned_us(self, layout: Layout) -> float:
        times_us = [each.predicted.makespan_us for each in self.plans[layout].values() if each]
        return float(np.mean(times_us)) if len(times_us) == len(self.batches) else math.inf

    def _plan_us(self, layout: Layout, number: int) -> float:
        """Plan a batch as training would, and return the makespan; infinite if nothing fits."""
        plans = self.plans.setdefault(layout, {})
        if number not in plans:
            plans[number] = None
            problem, costs = replace(self.batches[number], placement=layout.placement.rank_of), self.sample.costs_of(layout)
            try:
                is_first = self.refusal is None or not begins_with_greedy(self.options.planner)
                if is_first or may_fit(problem, costs, self.options):
                    make = plan_once if self.refusal is None else partial(plan, names_cap=False)
                    plans[number] = make(problem, costs, self.options)
            except InfeasibleError as error:
                self.refusal = self.refusal or error
        planned = plans[number]
        return math.inf if planned is None else planned.predicted.makespan_us


def fastest(layouts: Sequence[Layout], sample: Sample) -> LayoutChoice:
    """Plan a few layouts and return the fastest, or a plainer one that is slower by less than `MIN_GAIN_SHARE`.

    Gains are over the first. Raises `InfeasibleError`, about the first, if none fits the caps.
    """
    search = _Search(sample, layouts[0])
    for layout in layouts:
        search.plan(layout)
    return search.best()


type WholeLogits = tuple[CostsOf, int]
"""Costs of a run without blocks of its loss, and the tokens of its longest sequence, which must fit with them, too."""


def settle(
    sample: Sample,
    *,
    tensor_ranks: int,
    opens_weights: bool = True,
    layouts: Sequence[Layout] = (),
    logits: WholeLogits | None = None,
) -> tuple[LayoutChoice, LayoutAnswer]:
    """Choose where no flag says it: the layout for a sample, then about split weight gradients (if open), then about the loss.

    Raises `InfeasibleError` if no layout fits the caps, and `EppError` for more ranks than layers. `layouts` are the only ones
    to choose from, the first that over which gains are; `logits` those of whole chunks at once.
    """
    choice = fastest(layouts, sample) if layouts else choose(sample)
    may_split = opens_weights and sample.num_ranks > 1
    split_gain = _gain_of_split(choice, sample, tensor_ranks) if may_split else 0.0
    logits_gain = 0.0 if logits is None else _gain_of_logits(choice, split_gain, sample, logits)
    gain = 1 - (1 - choice.gain) * (1 - split_gain) * (1 - logits_gain)
    return choice, LayoutAnswer(choice.layout, split_gain > 0, logits_gain > 0, gain)


def _gain_of_split(choice: LayoutChoice, sample: Sample, tensor_ranks: int) -> float:
    """Return the share of time that a plan saves with weight gradients as actions of their own; 0 for too little.

    One batch decides, since such plans take up to three times as long as others, with 80 layers on 16 ranks 6 s: in seven
    searches on 4 to 16 ranks its share was at most 0.5 percentage points off the mean of three batches, and on the same side.
    """
    options = replace(_steady(sample.options), split_weight=True)
    gain = 1 - plan_once(choice.batch, sample.costs_of(choice.layout), options).predicted.makespan_us / choice.batch_us
    return gain if gain > least_gain_of_split(tensor_ranks) else 0.0


def least_gain_of_split(tensor_ranks: int) -> float:
    """Return the share of time that split weight gradients must save, with so many ranks that share every layer.

    Whole backwards overlap their exchange with the weight's gradient, which no cost says, so that more must be saved.
    """
    return MIN_GAIN_OF_SEVERAL_SHARE if tensor_ranks > 1 else MIN_GAIN_SHARE


def _gain_of_logits(choice: LayoutChoice, split_gain: float, sample: Sample, logits: WholeLogits) -> float:
    """Return the share of time that logits at once save in a batch; 0 for too little, and where they do not fit.

    By formula 0.8 to 2.1 % for Qwen3 8B and 30B-A3B, Llama 3 8B and Moonlight: a loss by blocks has one product more.
    """
    costs_of, longest = logits
    costs, options = costs_of(choice.layout), _steady(sample.options)
    options = replace(options, split_weight=options.split_weight or split_gain > 0)
    try:
        took_us = plan_once(choice.batch, costs, options).predicted.makespan_us
        if (saved := 1 - took_us / (choice.batch_us * (1 - split_gain))) < MIN_GAIN_SHARE:
            return 0.0
        alone = replace(choice.batch, lengths=(longest,), trained=(), loss_groups=(), microbatches=(), spans=(), borrowed=())
        plan(alone, costs, options)
    except InfeasibleError:
        return 0.0
    return saved


def _plainness(layout: Layout) -> tuple[int, bool, bool]:
    """Sort key: few stages per rank, looped, the vocabulary on the last stage."""
    placement = layout.placement
    return placement.num_chunks, not placement.is_looped, layout.shards_vocabulary


def _typical(problems: Sequence[Problem], times_us: Sequence[float]) -> tuple[Problem, ...]:
    """Return `PLANNED_BATCHES` batches from the middles of equal parts of all, by the time that they take; equal ones once."""
    order = sorted({problem: at for at, problem in enumerate(problems)}.values(), key=lambda at: (times_us[at], at))
    count = min(PLANNED_BATCHES, len(order))
    return tuple(problems[order[(2 * part + 1) * len(order) // (2 * count)]] for part in range(count))


def _steady(options: Options) -> Options:
    """Return options whose plans do not depend on the clock: of such a planner, the one by which it begins."""
    return replace(options, planner="greedy" if begins_with_greedy(options.planner) else options.planner)
