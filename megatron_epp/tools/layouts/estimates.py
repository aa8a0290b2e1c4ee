"""Estimates of layouts for the batches of a sample, each made once, with as few chunk tables as the question needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.estimate import CHUNKS_PER_RANK, Estimate, estimate
from megatron_epp.tools.layouts.rank_work import CostsOf, LayerWork

Grains = tuple[int | None, ...]
"""Chunks per rank of the best estimated plan of every batch; None where it runs sequences whole, or none fits."""
_MIDDLING, _COARSE, _COARSER, _FINE = 12, 6, 3, 24  # chunks per rank: the grains of `CHUNKS_PER_RANK` by name


class Estimates:
    """Estimated makespans of layouts. `batches`: of one replica each; their placement does not matter."""

    def __init__(self, batches: Sequence[Problem], costs_of: CostsOf, options: Options, floors: LayerWork) -> None:
        self.batches, self.costs_of, self.options, self.floors = batches, costs_of, options, floors
        self._with_grains = cache(self._estimated)

    def batch_us(self, layout: Layout, number: int) -> float:
        """Estimate the makespan of one batch; infinite where no estimate fits the caps, though a plan may."""
        return _time_us(self._widely(layout, number))

    def mean_us(self, layout: Layout) -> float:
        """Estimate the mean makespan of the batches; infinite as in `batch_us`."""
        return math.fsum(self.batch_us(layout, number) for number in range(len(self.batches))) / len(self.batches)

    def grains(self, layout: Layout) -> Grains:
        every = [self._widely(layout, number) for number in range(len(self.batches))]
        return tuple(None if estimate is None else estimate.chunks_per_rank for estimate in every)

    def mean_like_us(self, layout: Layout, grains: Grains, enough_us: float = math.inf) -> float:
        """Estimate the mean makespan with the grains of a layout that differs little; infinite from `enough_us` on."""
        least_us = [float(time_us) for time_us in self.floors.ranks_us(layout).max(axis=0)]
        for number in reversed(range(len(self.batches))):
            if math.fsum(least_us) >= enough_us * len(least_us):
                return math.inf
            least_us[number] = _time_us(self._like(layout, number, grains[number]))
        return math.fsum(least_us) / len(least_us)

    def by_business(self, layout: Layout, grains: Grains) -> list[int]:
        """Order the ranks from the least to the most busy, recompute included, in the last batch."""
        estimate = self._like(layout, len(self.batches) - 1, grains[-1])
        busy_us = [0.0] * layout.placement.num_ranks if estimate is None else estimate.busy_us
        return sorted(range(len(busy_us)), key=lambda rank: (busy_us[rank], rank))

    def _widely(self, layout: Layout, number: int) -> Estimate | None:
        """Estimate a batch with all grains; with several stages per rank, which take long, with the better one's neighbours."""
        if layout.placement.num_chunks == 1:
            return self._with_grains(layout, number, CHUNKS_PER_RANK)
        middling, coarse = (self._with_grains(layout, number, (grain,)) for grain in (_MIDDLING, _COARSE))
        next_one = _COARSER if _time_us(coarse) < _time_us(middling) else _FINE
        return min(middling, coarse, self._with_grains(layout, number, (next_one,)), key=_time_us)

    def _like(self, layout: Layout, number: int, grain: int | None) -> Estimate | None:
        return self._widely(layout, number) if grain is None else self._with_grains(layout, number, (grain,))

    def _estimated(self, layout: Layout, number: int, grains: tuple[int, ...]) -> Estimate | None:
        problem = replace(self.batches[number], placement=layout.placement.rank_of)
        try:
            return estimate(problem, self.costs_of(layout), self.options, grains)
        except InfeasibleError:
            return None


def _time_us(estimate: Estimate | None) -> float:
    return math.inf if estimate is None else estimate.makespan_us
