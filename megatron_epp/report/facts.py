"""Figures that several reports show, read off a plan without simulating it again."""

from __future__ import annotations

from megatron_epp.schedule.action import Action, Op
from megatron_epp.schedule.plan import Plan


def busy_us(plan: Plan, rank: int) -> float:
    """Compute time of a rank, recompute included."""
    return sum(step.time_us for step in plan.ranks[rank])


def bubble_fraction(plan: Plan, rank: int) -> float:
    """Share of the makespan in which the rank does not compute, 0 to 1."""
    makespan_us = plan.predicted.makespan_us
    return 1.0 - busy_us(plan, rank) / makespan_us if makespan_us else 0.0


def recompute_layers(plan: Plan, rank: int) -> tuple[int, int]:
    """Layer forwards that a rank runs twice, and layer forwards it runs at all, counted over stages and chunks."""
    stages = [stage for stage, on in enumerate(plan.placement) if on == rank]
    twice = sum(sum(plan.recompute_layers[stage]) for stage in stages)
    return twice, sum(plan.num_layers[stage] for stage in stages) * len(plan.chunks)


def recompute_share(plan: Plan) -> float:
    """Share of the layer forwards that run twice, each counted with its chunk's tokens, 0 to 1."""
    tokens = [chunk.num_tokens for chunk in plan.chunks]
    twice = sum(layers * n for row in plan.recompute_layers for layers, n in zip(row, tokens, strict=True))
    return twice / (sum(plan.num_layers) * sum(tokens)) if tokens else 0.0


def recompute_in_backward(plan: Plan) -> dict[Action, float]:
    """Estimated share of each backward's time that is recompute inside it, by action.

    A plan holds the time of the whole action; the estimate is the forward's time times the share of its layers that recompute.
    Backwards without recompute, and those with an `R` of their own, are left out.
    """
    steps = {step.action: step for rank in plan.ranks for step in rank}
    shares = {}
    for stage, row in enumerate(plan.recompute_layers):
        for chunk, layers in enumerate(row):
            forward, backward = steps.get(Action(Op.F, stage, chunk)), steps.get(Action(Op.B, stage, chunk))
            if layers and forward and backward and backward.time_us > 0 and Action(Op.R, stage, chunk) not in steps:
                again_us = forward.time_us * layers / plan.num_layers[stage]
                shares[backward.action] = min(again_us / backward.time_us, 1.0)
    return shares
