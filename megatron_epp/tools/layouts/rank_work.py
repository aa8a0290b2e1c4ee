"""Work of the ranks under a layout, without planning, and layouts that level it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_epp.cost.balance import spread_layers
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import causal_pairs
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Problem

type CostsOf = Callable[[Layout], PipelineCosts]  # the costs of a pipeline with a layout
WHOLE, HALF = 2, 1  # half layers that a move between stages takes along


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Time of forward and backward of the parts of a model, without the fixed part of a pass, for each of several batches."""

    # attention_us, mlp_us: of the halves of one layer; all layers are alike
    attention_us: NDArray[np.float64]
    mlp_us: NDArray[np.float64]
    # first_us, last_us: what the first and the last stage do besides their layers; the latter is the output layer's work,
    # which shards divide
    first_us: NDArray[np.float64]
    last_us: NDArray[np.float64]

    @staticmethod
    def of(problems: Sequence[Problem], costs_of: CostsOf, *, halves: bool) -> LayerWork:
        """Return the work of batches; without `halves` in the costs, both halves of a layer count as equal."""
        parts = (WHOLE, HALF, HALF, WHOLE) if halves else (WHOLE, WHOLE, WHOLE)
        costs = costs_of(Layout(parts, Placement("looped", len(parts), 1)))
        times = np.array([_stages_us(problem, costs) for problem in problems]).T
        attention, mlp = (times[1], times[2]) if halves else (times[1] / 2, times[1] / 2)
        return LayerWork(attention, mlp, times[0] - attention - mlp, times[-1] - attention - mlp)

    def ranks_us(self, layout: Layout) -> NDArray[np.float64]:
        """Time of every rank's stages, ``[rank][batch]``."""
        times = np.zeros((layout.placement.num_ranks, len(self.mlp_us)))
        cuts = pairwise(accumulate(layout.halves, initial=0))
        for rank, (start, end) in zip(layout.placement.rank_of, cuts, strict=True):
            times[rank] += ((end + 1) // 2 - (start + 1) // 2) * self.attention_us + (end // 2 - start // 2) * self.mlp_us
        times[0] += self.first_us
        if layout.shards_vocabulary:
            return times + self.last_us / layout.placement.num_ranks
        times[layout.placement.last_rank] += self.last_us
        return times

    def floor_us(self, layout: Layout) -> float:
        """Mean over the batches of the busiest rank's time, which no plan beats."""
        return float(self.ranks_us(layout).max(axis=0).mean())

    def spread(self, num_layers: int, placement: Placement, step: int, *, shards_vocabulary: bool = False) -> Layout:
        """Return a layout that levels the ranks' times, in which every stage has a multiple of `step`: `WHOLE` or `HALF`."""
        extra_us = [0.0] * placement.num_stages
        extra_us[0] += float(self.first_us.mean())
        extra_us[-1] += 0.0 if shards_vocabulary else float(self.last_us.mean())
        unit_us = float((self.attention_us + self.mlp_us).mean()) * step / WHOLE
        counts = spread_layers(unit_us, extra_us, num_layers * WHOLE // step, placement.rank_of)
        return self._levelled(Layout(tuple(step * count for count in counts), placement, shards_vocabulary), step)

    def _levelled(self, layout: Layout, step: int) -> Layout:
        """Move `step` half layers away from the busiest rank as long as that helps."""
        best = self._unevenness(layout)
        while True:
            busiest = int(self.ranks_us(layout).mean(axis=1).argmax())
            scored = [(self._unevenness(other), other.halves) for other in moved(layout, busiest, step)]
            score, halves = min(scored, default=(best, layout.halves))
            if score >= best:
                return layout
            best, layout = score, replace(layout, halves=halves)

    def _unevenness(self, layout: Layout) -> tuple[float, float]:
        times = self.ranks_us(layout)
        return float(times.max(axis=0).mean()), float((times**2).mean())


def moved(layout: Layout, source: int, step: int, targets: Sequence[int] | None = None) -> Iterator[Layout]:
    """Yield the layouts with `step` half layers less on a stage of one rank, and as many more on a stage of another.

    Only the first and the last stage may end up without layers.
    """
    last = len(layout.halves) - 1
    for giver in layout.placement.stages(source):
        left = layout.halves[giver] - step
        if left < 0 or (left == 0 and giver not in (0, last)):
            continue
        for taker, rank in enumerate(layout.placement.rank_of):
            if rank == source or (targets is not None and rank not in targets):
                continue
            halves = list(layout.halves)
            halves[giver] -= step
            halves[taker] += step
            yield replace(layout, halves=tuple(halves))


def _stages_us(problem: Problem, costs: PipelineCosts) -> list[float]:
    """Time of a batch on every stage, without the fixed part of a pass."""
    tokens, pairs = sum(problem.lengths), sum(causal_pairs(0, length) for length in problem.lengths)
    times = []
    for stage in range(len(costs.stages)):
        lines = [costs.line(stage, "forward", problem.trained_share)]
        lines += [] if problem.forward_only else [costs.line(stage, "backward", problem.trained_share)]
        times.append(sum(line.per_token_us * tokens + line.per_pair_us * pairs for line in lines))
    passes = ("forward",) if problem.forward_only else ("forward", "backward")
    times[0] += sum(map(costs.span_us, passes)) * sum(span.work for spans in problem.spans for span in spans)
    return times
