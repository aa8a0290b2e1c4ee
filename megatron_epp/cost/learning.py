"""Costs learnt from the first iterations of a training: measured times and bytes of whole microbatches on every stage."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.stage import StageCosts
from megatron_epp.cost.work import NO_TIME, causal_pairs
from megatron_epp.plan import Action, Op, Plan

WARM_UP = 1
"""Iterations that are not recorded: kernels are chosen and buffers allocated in them."""
RECORDED = 3
"""Iterations whose times costs are fitted to."""


_NO_EXTRAS: dict[str, Any] = dict.fromkeys(("extra_forward", "extra_backward", "extra_weight"), NO_TIME)


class Learnt(NamedTuple):
    """Measurements of one rank.

    Attributes:
        times: points of forwards, backwards and weight gradients that are actions of their own (W), by stage.
        sizes: tokens and bytes kept by stage, from forward to backward (F) and from backward to weight gradient (W); empty
            where memory is not measured.
        peak_bytes: most bytes allocated in the recorded iterations; 0 where memory is not measured.
        offloadable_share: share of the kept bytes that can be offloaded; 0 where it is not measured.
    """

    times: dict[tuple[int, Op], list[Point]]
    sizes: dict[tuple[int, Op], list[tuple[int, int]]]
    peak_bytes: int = 0
    offloadable_share: float = 0.0


@dataclass(slots=True)
class Learner:
    """Collects times and bytes of actions, iteration by iteration."""

    seen: int = 0
    learnt: Learnt = field(default_factory=lambda: Learnt({}, {}))

    @property
    def is_recording(self) -> bool:
        return WARM_UP <= self.seen < WARM_UP + RECORDED

    @property
    def recorded(self) -> int:
        """Number of iterations that were recorded."""
        return min(max(0, self.seen - WARM_UP), RECORDED)

    @property
    def is_done(self) -> bool:
        return self.seen >= WARM_UP + RECORDED

    def add(
        self,
        plan: Plan,
        events: Sequence[tuple[str, float, float, float | None]],
        kept_bytes: Mapping[tuple[Op, int, int], int],
        peak_bytes: int = 0,
        offloadable_share: float = 0.0,
    ) -> None:
        """Add a training iteration.

        Args:
            plan: its plan.
            events: of this rank: action, start, end and processor time in microseconds; empty if it was not recorded.
            kept_bytes: bytes that each forward (F) left allocated, or each backward for its weight gradient (W), by operation,
                stage and chunk; empty where memory is not measured.
            peak_bytes: most bytes allocated on this rank so far; 0 where memory is not measured.
            offloadable_share: share of the kept bytes that can be offloaded; 0 where it is not measured.
        """
        self.seen += 1
        for text, start_us, end_us, _ in events:
            op, stage, chunk = Action.parse(text)
            if op in (Op.F, Op.B, Op.W):
                tokens, pairs = size_of(plan, chunk)
                self.learnt.times.setdefault((stage, op), []).append(Point(tokens, pairs, end_us - start_us))
        self.learnt = self.learnt._replace(
            peak_bytes=max(peak_bytes, self.learnt.peak_bytes), offloadable_share=offloadable_share
        )
        for (op, stage, chunk), size in kept_bytes.items():
            self.learnt.sizes.setdefault((stage, op), []).append((size_of(plan, chunk)[0], size))


def size_of(plan: Plan, chunk: int) -> tuple[int, int]:
    """Padded tokens of a chunk, and its causal query-key pairs."""
    return plan.padded_tokens(chunk), sum(causal_pairs(start, end) for _, start, end in plan.chunks[chunk].segments)


def fitted_costs(base: PipelineCosts, everyone: Sequence[Learnt]) -> PipelineCosts:
    """Fit costs to the measurements of all ranks; equal on every rank, for equal inputs.

    Args:
        base: costs by formula, whose layers, messages and static bytes stay.
        everyone: measurements of every rank of the replica; ranks that share a stage count together.
    """
    times: dict[tuple[int, Op], list[Point]] = {}
    sizes: dict[tuple[int, Op], list[tuple[int, int]]] = {}
    for one in everyone:
        for key, points in one.times.items():
            times.setdefault(key, []).extend(points)
        for key, found in one.sizes.items():
            sizes.setdefault(key, []).extend(found)
    stages = []
    for number, stage in enumerate(base.stages):
        forward, backward, weight = (
            fit_line(_medians(times[number, op])).line.scaled(1 / stage.num_layers) if (number, op) in times else NO_TIME
            for op in (Op.F, Op.B, Op.W)
        )
        known = replace(stage, forward=forward, backward=backward + weight, weight=weight, **_NO_EXTRAS)
        if found_bytes := sizes.get((number, Op.F)):
            known = _with_bytes(known, max(size / tokens for tokens, size in found_bytes))
        if found_bytes := sizes.get((number, Op.W)):
            per_token = max(0.0, *(size / tokens for tokens, size in found_bytes)) / stage.num_layers
            known = replace(known, weight_bytes_per_token=per_token, extra_weight_bytes_per_token=0.0)
        stages.append(replace(known, recompute={}, kv_bytes_per_token=0.0))
    share = min(one.offloadable_share for one in everyone)
    return replace(base, stages=tuple(stages), offloadable_share=share, name="learnt")


def with_static(costs: PipelineCosts, num_bytes: Mapping[int, int]) -> PipelineCosts:
    """Set the bytes that stages hold throughout.

    Args:
        costs: the learnt costs.
        num_bytes: by stage; 0 for those that are not named.
    """
    stages = (replace(stage, static=Static(weights=num_bytes.get(number, 0))) for number, stage in enumerate(costs.stages))
    return replace(costs, stages=tuple(stages))


def _with_bytes(stage: StageCosts, kept_per_token: float) -> StageCosts:
    """Share the bytes that a stage was measured to keep per token between its layers, besides its extras by formula.

    A layer keeps its input at least, which is what it keeps if it recomputes in full.
    """
    least = stage.recomputed_layer_bytes_per_token
    of_layers = max(kept_per_token - stage.extra_bytes_per_token, stage.num_layers * least)
    return replace(
        stage,
        layer_bytes_per_token=of_layers / stage.num_layers,
        full_bytes_per_token=None,
        attended_bytes_per_token=None,
        apart_bytes_per_token=None,
        apart_attended_bytes_per_token=None,
        extra_bytes_per_token=max(0.0, kept_per_token - of_layers),
        head_bytes_per_token=0.0,
        working_bytes_per_token=0.0,
    )


def _medians(points: Sequence[Point]) -> list[Point]:
    """Replace points of equal sizes by one with the median of their times."""
    by_size: dict[tuple[float, float], list[float]] = {}
    for tokens, pairs, time_us in points:
        by_size.setdefault((tokens, pairs), []).append(time_us)
    return [Point(*size, statistics.median(found)) for size, found in sorted(by_size.items())]


def error_of(base: PipelineCosts, learnt: PipelineCosts, sizes: Sequence[tuple[int, int]]) -> float:
    """Ratio of the learnt time of microbatches to that by the earlier costs, over all stages, forwards and backwards.

    Args:
        base, learnt: the earlier and the learnt costs.
        sizes: tokens and pairs of each microbatch.
    """

    def total_us(costs: PipelineCosts) -> float:
        lines = [line for stage in costs.stages for line in (stage.stage_forward, stage.stage_backward)]
        return sum(line.time_us(tokens, pairs) for line in lines for tokens, pairs in sizes)

    return total_us(learnt) / total_us(base)
