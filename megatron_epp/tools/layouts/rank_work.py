"""Work of the ranks under a layout, without planning, and layouts that level it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_epp.cost.balance import spread_layers
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import tokens_and_pairs
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.chunks.chunker import own_parts

type CostsOf = Callable[[Layout], PipelineCosts]  # the costs of a pipeline with a layout


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Time of forward and backward of the parts of a model, without the fixed part of a pass, for each of several batches."""

    layer_us: NDArray[np.float64]  # of one layer; all are alike
    # first_us, last_us: what the first and the last stage do besides their layers; the latter is the output layer's work,
    # which shards divide
    first_us: NDArray[np.float64]
    last_us: NDArray[np.float64]

    @staticmethod
    def of(problems: Sequence[Problem], costs_of: CostsOf) -> LayerWork:
        costs = costs_of(Layout((1, 1, 1), Placement("looped", 3, 1)))
        first, layer, last = np.array([_stages_us(problem, costs) for problem in problems]).T
        return LayerWork(layer, first - layer, last - layer)

    def ranks_us(self, layout: Layout) -> NDArray[np.float64]:
        """Time of every rank's stages, ``[rank][batch]``."""
        times = np.zeros((layout.placement.num_ranks, len(self.layer_us)))
        for rank, count in zip(layout.placement.rank_of, layout.layers, strict=True):
            times[rank] += count * self.layer_us
        times[0] += self.first_us
        if layout.shards_vocabulary:
            return times + self.last_us / layout.placement.num_ranks
        times[layout.placement.last_rank] += self.last_us
        return times

    def floor_us(self, layout: Layout) -> float:
        """Mean over the batches of the busiest rank's time, which no plan beats."""
        return float(self.ranks_us(layout).max(axis=0).mean())

    def spread(self, num_layers: int, placement: Placement, *, shards_vocabulary: bool = False) -> Layout:
        """Return a layout that levels the ranks' times."""
        extra_us = [0.0] * placement.num_stages
        extra_us[0] += float(self.first_us.mean())
        extra_us[-1] += 0.0 if shards_vocabulary else float(self.last_us.mean())
        layers = spread_layers(float(self.layer_us.mean()), extra_us, num_layers, placement.rank_of)
        return self._levelled(Layout(layers, placement, shards_vocabulary))

    def _levelled(self, layout: Layout) -> Layout:
        """Move layers away from the busiest rank as long as that helps."""
        best = self._unevenness(layout)
        while True:
            busiest = int(self.ranks_us(layout).mean(axis=1).argmax())
            scored = [(self._unevenness(other), other.layers) for other in moved(layout, busiest)]
            score, layers = min(scored, default=(best, layout.layers))
            if score >= best:
                return layout
            best, layout = score, replace(layout, layers=layers)

    def _unevenness(self, layout: Layout) -> tuple[float, float]:
        times = self.ranks_us(layout)
        return float(times.max(axis=0).mean()), float((times**2).mean())


def moved(layout: Layout, source: int, targets: Sequence[int] | None = None) -> Iterator[Layout]:
    """Yield the layouts with a layer less on a stage of one rank, and one more on a stage of another.

    Only the first and the last stage may end up without layers.
    """
    last = len(layout.layers) - 1
    for giver in layout.placement.stages(source):
        left = layout.layers[giver] - 1
        if left < 0 or (left == 0 and giver not in (0, last)):
            continue
        for taker, rank in enumerate(layout.placement.rank_of):
            if rank == source or (targets is not None and rank not in targets):
                continue
            layers = list(layout.layers)
            layers[giver] -= 1
            layers[taker] += 1
            yield replace(layout, layers=tuple(layers))


def _stages_us(problem: Problem, costs: PipelineCosts) -> list[float]:
    """Time of a batch on every stage, without the fixed part of a pass."""
    (tokens, pairs), times = tokens_and_pairs(own_parts(problem)), []
    passes = ("forward",) if problem.forward_only else ("forward", "backward")
    for stage in range(len(costs.stages)):
        lines = [costs.line(stage, name, problem.trained_share) for name in passes]
        times.append(sum(line.per_token_us * tokens + line.per_pair_us * pairs for line in lines))
    times[0] += sum(map(costs.span_us, passes)) * sum(span.work for spans in problem.spans for span in spans)
    return times
