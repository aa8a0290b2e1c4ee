"""Seeded batches planned as training would, over everything that changes how ranks launch."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.library import load_costs
from megatron_epp.cost.memory import on_device
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.matched import plan_matched
from megatron_epp.schedule import UNLIMITED_BYTES, InfeasibleError, Plan
from megatron_epp.schedule.placement import Placement

LAYERS = 32


@cache
def costs_of(num_stages: int) -> PipelineCosts:
    return on_device(load_costs("llama3-8b-h100").costs([LAYERS // num_stages] * num_stages))


def random_plans(seed: int) -> tuple[Plan, ...]:
    """A plan, or those of replicas that share experts; none where the batch fits no cap that was drawn."""
    rng = random.Random(seed)
    ranks, stages = rng.choice([2, 3, 4, 8]), rng.choice([1, 1, 2, 4])
    stages = 1 if LAYERS % (ranks * stages) else stages
    placement = Placement(rng.choice(["v", "looped"]) if stages > 1 else "looped", ranks, stages)
    costs = costs_of(placement.num_stages) if LAYERS % ranks == 0 else costs_of_uneven(ranks)
    longest = rng.choice([16384, 65536, 262144])
    replicas = rng.choice([2, 3]) if rng.random() < 0.15 else 1
    problems = [
        Problem(
            tuple(
                min(longest, int(rng.lognormvariate(7.2, rng.choice([1.3, 2.5]))) + 8) for _ in range(rng.choice([4, 8, 16]))
            ),
            placement.rank_of,
            (UNLIMITED_BYTES,) * ranks,
        )
        for _ in range(replicas)
    ]
    if rng.random() < 0.1:
        problems = [replace(problem, forward_only=True) for problem in problems]
    options = Options(
        split_weight=rng.random() < 0.4,
        offload=rng.random() < 0.4,
        slices=rng.choice([1, 3, 8]) if rng.random() < 0.5 else None,
        planner=rng.choice(["1f1b", "seq1f1b", "1f1b-packed"]) if stages == replicas == 1 and rng.random() < 0.1 else "greedy",
    )
    try:
        made = _planned(problems, costs, options)
        if rng.random() < 0.6:  # a cap between what is held throughout and the peak: recompute, copies, caches at the host
            static, peak = (
                max(max(row) for row in rows)
                for rows in zip(*((p.static_bytes, p.predicted.peak_bytes) for p in made), strict=True)
            )
            cap = static + int((peak - static) * rng.choice([0.08, 0.2, 0.5, 0.8]))
            problems = [replace(problem, cap_bytes=(cap,) * ranks) for problem in problems]
            made = _planned(problems, costs, options)
    except InfeasibleError:
        return ()
    return made


@cache
def costs_of_uneven(ranks: int) -> PipelineCosts:
    layers = [LAYERS // ranks + (rank < LAYERS % ranks) for rank in range(ranks)]
    return on_device(load_costs("llama3-8b-h100").costs(layers))


def _planned(problems: list[Problem], costs: PipelineCosts, options: Options) -> tuple[Plan, ...]:
    if len(problems) > 1:
        return plan_matched(problems, costs, replace(options, planner="greedy"))
    return (plan(problems[0], costs, options),)
