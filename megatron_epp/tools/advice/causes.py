"""The gain of plans over Megatron's own 1F1B, divided by cause: what its flags bring already, and what plans add.

Megatron's side may have what its flags can say: several stages per rank (interleaved 1F1B), whole layers per stage
(``--pipeline-model-parallel-layout``), rows of any length, and its kinds of recompute. Its loss has no blocks: all logits are
there at once, and blocks are lent to it only where nothing fits without. Each cause is added to those before it, so the
factors multiply to the whole gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.plan.layout import Layout, layers_text
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.baselines.whole import MLP_AGAIN, UniformDecisions, packed_contest
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.fitted import fitted
from megatron_epp.tools.layouts.rank_work import CostsOf, LayerWork, moved
from megatron_epp.tools.report.text import format_us, table

CAUSES = (
    "layers and virtual stages, by Megatron's flags",
    "packing: rows of equal work, or of more tokens",
    "recompute and offload chosen for each row",
    "slices and order",
    "vocabulary over all ranks, weight gradients apart",
)
"""Differences of plans from 1F1B of even layers on one stage per rank, whose rows of the context are packed by first fit."""
SHARED = "tokens in common, which run once"  # the last cause where sequences begin alike
BY_FLAGS = 2  # number of causes, the first, that Megatron's own flags and data bring
PLANNER = "1f1b-packed"
STAGES_PER_RANK = (1, 2, 3, 4, 6, 8)  # stages per rank that are tried for Megatron, where there are layers for them
_CONTEXTS = (2, 4, 8)  # lengths of rows that are tried besides the context, in contexts, as long as longer ones are faster
_MOVES, _TARGETS = 2, 4
"""Most moves of a layer to another rank that are made from the best layout, and the layouts that are tried for each."""


class Stock(NamedTuple):
    """Rows of whole sequences in Megatron's order, by the time of a step."""

    step_us: float  # of the pipeline's rows, and what a step has besides
    layout: Layout  # of the stages
    row_tokens: int  # most of a row
    # problem, costs, decisions: of the replica that takes longest; recompute is uniform, or of each row
    problem: Problem
    costs: PipelineCosts
    decisions: Decisions

    @property
    def peak_bytes(self) -> int:
        """Most bytes of any rank, without messages in flight."""
        tables = self.decisions.tables(self.problem, self.costs)
        return max(peaks_bytes(self.decisions.order, tables, self.decisions.recompute_steps))

    @property
    def recompute(self) -> str:
        """Recompute in the words of Megatron's flags."""
        most = max(map(max, self.decisions.recompute_steps))
        if not most:
            return "no recompute"
        if isinstance(self.decisions, UniformDecisions):
            return f"recompute of all layers in groups of {self.decisions.group}"
        layers = "a layer" if most == 1 else f"{most} layers"
        return f"recompute of {'norms and MLPs' if self.decisions.modes == MLP_AGAIN else f'{layers} of each stage'}"


Steps = tuple[Stock | None, ...]  # A step before any cause and with each of the first three; None where nothing fits


@dataclass(frozen=True, slots=True, kw_only=True)
class StockChoices:
    """A batch at given parallel sizes, and what may be chosen for it."""

    # Of the replica that takes longest: sequences dealt by count first, then divided by work; one if equal
    problems: tuple[Problem, ...]
    costs_of: CostsOf  # costs of a layout without a loss by blocks
    own_costs_of: CostsOf  # costs of a layout as plans have them
    num_layers: int  # of the model
    context: int  # tokens of a row that Megatron packs by default
    options: Options  # of the plans
    even: Layout
    counts: Sequence[int] = STAGES_PER_RANK  # stages per rank that Megatron may have
    layouts: tuple[Layout, ...] = ()  # more layouts to try, of which those count that its flags can say
    added_us: Callable[[Layout], float] = lambda _: 0.0  # time of a step besides the pipeline's with a layout

    def steps(self, *, even_only: bool = False) -> Steps:
        """Return the steps before any cause, with layers and virtual stages (unless `even_only`), and with packing."""
        layouts = [self.even] if even_only else [*dict.fromkeys((self.even, *self._balanced(), *self.layouts))]
        dealt, by_work = self.problems[0], self.problems[-1]
        first = [self._at(layout, dealt, self.context, first_fit=True) for layout in layouts]
        by_hand = fastest(*first)
        packed = fastest(by_hand, *(self._at(layout, by_work, self.context) for layout in layouts))
        if packed is None:
            return first[0], by_hand, None
        for contexts in _CONTEXTS:
            longer = self._at(packed.layout, by_work, contexts * self.context)
            if longer is None or longer.step_us >= packed.step_us:
                break
            packed = longer
        return first[0], by_hand, packed if even_only else self._moved(packed)

    def by_chunk(self, packed: Stock | None) -> Stock | None:
        """Return the fastest rows with recompute, and with the options' offload, chosen for each; no slower than given ones."""
        best = packed
        for layout in dict.fromkeys(([packed.layout] if packed else [self.even]) + [*self.layouts]):
            for contexts in (1, *_CONTEXTS):
                best = fastest(best, self._at(layout, self.problems[-1], contexts * self.context, by_chunk=True))
        if best is None or not self.options.offload:
            return best
        costs, options, decisions = self.own_costs_of(best.layout), replace(self.options, planner=PLANNER), best.decisions
        with suppress(EppError):
            copied = fitted(decisions.order, decisions.chunks, best.problem, costs, options)
            step_us = copied.makespan_us(best.problem, costs) + self.added_us(best.layout)
            best = fastest(best, best._replace(step_us=step_us, costs=costs, decisions=copied))
        return best

    def _at(
        self, layout: Layout, problem: Problem, tokens: int, *, first_fit: bool = False, by_chunk: bool = False
    ) -> Stock | None:
        """Return the fastest rows of at most so many tokens; None where nothing fits, or Megatron's flags cannot say it."""
        if layout.to_megatron() is None or layout.shards_vocabulary:
            return None
        asked = replace(problem, placement=layout.placement.rank_of)
        options = Options(planner=PLANNER, context=max(tokens, max(problem.lengths)))
        for costs_of in (self.own_costs_of,) if by_chunk else (self.costs_of, self.own_costs_of):
            costs = costs_of(layout)
            with suppress(InfeasibleError):  # there are fewer rows than ranks
                contest = packed_contest(asked, costs, options, first_fit=first_fit, by_chunk=by_chunk, in_groups=True)
                if contest.best is not None:
                    return Stock(contest.best_us + self.added_us(layout), layout, tokens, asked, costs, contest.best)
        return None

    def _balanced(self) -> Iterator[Layout]:
        """Yield layouts that level the ranks' work, by the number of stages per rank."""
        ranks = self.even.placement.num_ranks
        if ranks == 1:
            return
        work = LayerWork.of(self.problems[-1:], self.costs_of)
        for count in self.counts:
            if ranks * count <= self.num_layers:
                yield work.spread(self.num_layers, Placement("looped", ranks, count))

    def _moved(self, start: Stock) -> Stock:
        """Move single layers away from the rank with the most work while that helps."""
        if start.layout.placement.num_ranks == 1:
            return start
        work = LayerWork.of(self.problems[-1:], self.costs_of)
        best = start
        for _ in range(_MOVES):
            times_us = work.ranks_us(best.layout).max(axis=1)
            others = moved(best.layout, int(times_us.argmax()), [int(times_us.argmin())])
            layouts = sorted(others, key=lambda layout: (sorted(layout.layers, reverse=True), layout.layers))[:_TARGETS]
            faster = fastest(best, *(self._at(layout, best.problem, best.row_tokens) for layout in layouts))
            if faster is None or faster is best:
                break
            best = faster
        return best


def fastest(*steps: Stock | None) -> Stock | None:
    """Return the step of least time, the first of equal ones; None if there is none."""
    return min(filter(None, steps), key=lambda step: step.step_us, default=None)


def stock_text(stock: Stock) -> str:
    placement = stock.layout.placement
    stages = f"{placement.num_chunks} stages" if placement.num_chunks > 1 else "one stage"
    return (
        f"{format_us(stock.step_us)}, {stages} on each rank, layers {layers_text(stock.layout.layers)}; "
        f"{len(stock.decisions.chunks)} rows of up to {stock.row_tokens:,} tokens; {stock.recompute}"
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """Times of a step in microseconds before any cause and with each of `CAUSES`, and `SHARED`; infinite where nothing fits."""

    steps_us: tuple[float, ...]

    @staticmethod
    def of(steps: Sequence[Stock | None], *plans_us: float) -> Gain:
        """Return the gain, given the steps before any cause and with the first three.

        `plans_us` are of plans with the vocabulary on the last stage and weight gradients within backwards, and with the rest.
        """
        return Gain((*(math.inf if step is None else step.step_us for step in steps), *plans_us))

    @property
    def by_cause(self) -> Iterator[tuple[str, float]]:
        return zip((*CAUSES, SHARED)[: len(self.steps_us) - 1], self.factors, strict=True)

    @property
    def factors(self) -> tuple[float, ...]:
        """Speed with each cause over that without it; infinite where nothing fits without it, 1 where nothing fits with it."""
        return tuple(1.0 if math.isinf(after) else before / after for before, after in pairwise(self.steps_us))

    @property
    def over_megatron(self) -> float:
        """Speed of plans over Megatron's own 1F1B at its best; infinite where that does not fit."""
        return self.steps_us[BY_FLAGS] / self.steps_us[-1]

    def as_json(self) -> dict[str, Any]:
        return {
            "causes": [{"cause": cause, "factor": _finite(factor)} for cause, factor in self.by_cause],
            "steps_us": [*map(_finite, self.steps_us)],
            "over_megatron": _finite(self.over_megatron),
        }

    def lines(self) -> list[str]:
        known = [step_us for step_us in self.steps_us if math.isfinite(step_us)]
        rows = [(cause, _times(factor)) for cause, factor in self.by_cause]
        before = "1F1B of even layers, one stage per rank" if known[0] == self.steps_us[0] else "the first that fits"
        rows.append((f"all together, over {before}", _times(known[0] / known[-1])))
        rows.append(("of it by plans, over Megatron's own at its best", _times(self.over_megatron)))
        return table(("gain by cause, each added to those above it", "times as fast"), rows, left=(0,))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _times(factor: float) -> str:
    return "fits only so" if math.isinf(factor) else f"{factor:.2f}x"


def without_shards(layout: Layout, problem: Problem, costs_of: CostsOf) -> list[Layout]:
    """Return layouts with the vocabulary on the last stage to plan in place of one that may divide it: the same layers, and
    layers levelled anew where it does, since the last stage then has more to do.
    """
    plain = replace(layout, shards_vocabulary=False)
    if plain == layout:
        return [layout]
    work = LayerWork.of((problem,), costs_of)
    return [plain, work.spread(layout.num_layers, layout.placement)]
