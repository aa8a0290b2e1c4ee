"""Balance of work over ranks, and the number of layers per stage that minimizes the busiest rank's time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_epp.cost.blocks import StageCosts
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import tokens_and_pairs
from megatron_epp.plan.chunk import Chunk


@dataclass(frozen=True, slots=True)
class Spread:
    layers: tuple[int, ...]  # of every stage, first to last
    excess: float  # share of the mean by which the busiest stage's time exceeds it; the other stages wait that long


WORTH = 0.05
"""Smallest saving of the busiest stage's time, as a share of the mean, for which `advice` suggests other layers; not
measured."""


def spread_layers(layer_us: float, extra_us: Sequence[float], num_layers: int, rank_of: Sequence[int] = ()) -> tuple[int, ...]:
    """Layers of each stage that minimize the busiest rank's time. Every stage has at least one.

    Each layer goes to the rank with the least work, and there to the stage with the least; among equals to the latest, which
    holds the fewest chunks at a time. Stages take `extra_us` besides layers; without `rank_of` each is on a rank of its own.
    """
    layers, ranks = [1] * len(extra_us), rank_of or range(len(extra_us))
    stages_of: dict[int, list[tuple[float, int]]] = {}
    for stage, (extra, rank) in enumerate(zip(extra_us, ranks, strict=True)):
        stages_of.setdefault(rank, []).append((extra + layer_us, -stage))
    least = [(sum(time_us for time_us, _ in stages), -rank) for rank, stages in stages_of.items()]
    for stages in (least, *stages_of.values()):
        heapq.heapify(stages)
    for _ in range(num_layers - len(layers)):
        busy_us, rank_back = least[0]
        heapq.heapreplace(least, (busy_us + layer_us, rank_back))
        time_us, back = stages_of[-rank_back][0]
        heapq.heapreplace(stages_of[-rank_back], (time_us + layer_us, back))
        layers[-back] += 1
    return tuple(layers)


def spreads(costs: PipelineCosts, chunks: Sequence[Chunk]) -> tuple[Spread, Spread]:
    """Current and balanced layers per stage for the tokens of chunks, for one stage per rank and identical layers."""
    tokens, pairs = tokens_and_pairs((start, end) for chunk in chunks for _, start, end in chunk.segments)

    def times_us(stage: StageCosts) -> tuple[float, float]:
        """Time of one layer and of the stage's other work, without the fixed part of a pass."""
        lines = (forward + backward for forward, backward in zip(stage.lines("forward"), stage.lines("backward"), strict=True))
        layer_us, *others_us = (line.per_token_us * tokens + line.per_pair_us * pairs for line in lines)
        return layer_us, sum(others_us)

    each, num_layers = [times_us(stage) for stage in costs.stages], sum(costs.num_layers)
    extra_us = [extra for _, extra in each]
    layer_us = sum(layer * count for (layer, _), count in zip(each, costs.num_layers, strict=True)) / max(num_layers, 1)
    mean_us = (layer_us * num_layers + sum(extra_us)) / len(each)

    def spread(layers: tuple[int, ...]) -> Spread:
        busiest_us = max(count * layer_us + other for count, other in zip(layers, extra_us, strict=True))
        return Spread(layers, busiest_us / mean_us - 1 if mean_us else 0.0)

    return spread(costs.num_layers), spread(spread_layers(layer_us, extra_us, num_layers))


def advice(
    costs: PipelineCosts,
    placement: Sequence[int],
    chunks: Sequence[Chunk],
    setting: Callable[[Sequence[int]], str] | None = None,
) -> str | None:
    """A sentence of advice if other layers per stage would save the busiest stage at least `WORTH`; None otherwise.

    Also None if ranks have several stages, or there are fewer layers than stages. `chunks` are typical of what stages run;
    `setting` gives words that set given layers per stage, for who asked; None names the layers alone.
    """
    if len(set(placement)) < len(placement) or sum(costs.num_layers) < len(placement) or not chunks:
        return None
    own, best = spreads(costs, chunks)
    if own.excess - best.excess < WORTH:
        return None
    layers, others = (", ".join(map(str, spread.layers)) for spread in (own, best))
    words = setting(best.layers) if setting else f"stages of {others} layers"
    return (
        f"stages of {layers} layers: the busiest takes {own.excess:.0%} longer than the mean, and the others wait for it; "
        f"{words} would make it {best.excess:.0%}, for sequences like these"
    )
