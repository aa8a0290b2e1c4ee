"""Ladders of recompute: each rung gives up more bytes at a higher price; and a backward peaks as a walk along its layers."""

import random
from itertools import pairwise

import numpy as np
import pytest

from megatron_epp.cost import LinearTime, ModeCosts, PipelineCosts, StageCosts, analytic_profile
from megatron_epp.cost.library import balanced_layers, load_cluster, load_flags, shape_of
from megatron_epp.cost.work import work_of
from megatron_epp.plan import RECOMPUTE_MODES, Chunk, Recompute, Segment, check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.passes import (
    ABSENT,
    BackwardBytes,
    LayerGroup,
    moments,
    num_steps_of,
    recompute_frontier,
    recompute_of,
)
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.plan.stages import stage_of

GIB = 1 << 30


def stage(draw: random.Random) -> StageCosts:
    layer = draw.randint(20, 60)
    return stage_of(
        num_layers=3,
        forward=LinearTime(5.0, 3.0, 0.1),
        backward=LinearTime(5.0, 6.0, 0.2),
        layer_bytes_per_token=layer,
        recomputed_layer_bytes_per_token=draw.randint(1, 5),
        kv_bytes_per_token=4,
        recompute={
            "selective": ModeCosts(LinearTime(4.0, 3.0), draw.randint(5, layer)),
            "mlp": ModeCosts(LinearTime(2.0, draw.uniform(1.0, 3.0)), draw.randint(8, layer)),
        },
    )


@pytest.mark.parametrize("seed", range(30))
def test_prices_rise_and_every_level_lies_on_or_above_the_ladder(seed: int):
    costs = PipelineCosts("random", (stage(random.Random(seed)),), 0.0)
    chunks = [Chunk((Segment(0, 0, 7),)), Chunk((Segment(1, 0, 900),)), Chunk((Segment(1, 900, 1000),))]
    work = work_of(chunks, (7, 1000))
    frontier = recompute_frontier(0, work, costs, RECOMPUTE_MODES)
    for c in range(len(chunks)):
        frontier_sums = [(int(r.saved[c]), float(r.layer_us[c])) for r in frontier if r.mode[c] != ABSENT]
        prices = [took_us / saved for saved, took_us in frontier_sums]
        assert prices == sorted(prices)
        assert all(saved > 0 for saved, _ in frontier_sums)
        corners = [(0, 0.0)]
        for saved, took_us in frontier_sums:
            corners.append((corners[-1][0] + saved, corners[-1][1] + took_us))
        for name in RECOMPUTE_MODES:
            one = Recompute(**{name: 1})
            saved = int((costs.activation_bytes(0, work) - costs.activation_bytes(0, work, one))[c])
            took_us = float(costs.recompute_us(0, work, one)[c])
            for (x0, y0), (x1, y1) in pairwise(corners):
                if x0 <= saved <= x1:
                    assert took_us >= y0 + (y1 - y0) * (saved - x0) / (x1 - x0) - 1e-6
            assert saved <= corners[-1][0]


@pytest.mark.parametrize("modes", [(0,), (1, 0), (2, 1, 0), (2, 0)])
def test_steps_and_what_they_come_to_say_the_same(modes: tuple[int, ...]):
    for taken in range(4 * len(modes) + 1):
        recompute = recompute_of(modes, 4, taken)
        assert num_steps_of(recompute, modes) == taken
        assert recompute.num_layers == min(taken, 4)
        assert sorted(map(recompute.mode, range(4)), key=[*RECOMPUTE_MODES, ""].index) == [
            recompute.mode(layer) for layer in range(4)
        ]


def test_attention_is_not_run_again_where_that_would_cost_most():
    """One long sequence under a cap: with all levels little is recomputed whole, and the plan is faster."""
    free = plan(problem((65536,), 2), pipeline(2), Options(slices=8))
    given = problem((65536,), 2, (max(free.predicted.peak_bytes) + max(free.static_bytes)) // 2)
    every, whole = (plan(given, pipeline(2), Options(slices=8, recompute_modes=modes)) for modes in ("all", "full"))
    counts = [sum(again.full for row in made.recompute for again in row) for made in (every, whole)]
    assert counts[0] < counts[1] / 4
    assert sum(again.selective + again.mlp for row in every.recompute for again in row) > 0
    assert not any(again.selective or again.mlp for row in whole.recompute for again in row)
    assert every.predicted.makespan_us < 0.97 * whole.predicted.makespan_us


@pytest.mark.slow  # ten seconds of planning
def test_four_million_tokens_are_planned_for_64_stages():
    """A sequence of 4M tokens on devices of 141 GB, eight ways each of tensor and context parallelism."""

    flags = load_flags("llama3-70b") | {"tensor_model_parallel_size": 8, "context_parallel_size": 8, "sequence_parallel": True}
    cluster = load_cluster("h200x8")
    profile = analytic_profile(shape_of(flags), cluster.rates)
    costs = profile.costs(balanced_layers(profile, 80, 64))
    assert cluster.device_memory_gb is not None
    made = plan(problem((1 << 22,), 64, int(0.9 * cluster.device_memory_gb * GIB), token_multiple=64), costs)
    assert check(made) == []
    assert max(made.predicted.peak_bytes) <= 0.9 * cluster.device_memory_gb * GIB


@pytest.mark.parametrize("seed", range(200))
def test_the_peak_of_a_backward_is_that_of_a_walk_along_its_layers(seed: int):
    draw = random.Random(seed)
    sizes = BackwardBytes(*(np.array(draw.randint(-9, 30)) for _ in BackwardBytes._fields))
    groups = [LayerGroup(draw.randint(1, 4), draw.randint(0, 20), draw.randint(0, 30)) for _ in range(draw.randint(0, 3))]
    live, walked = int(sizes.constant + sizes.reached), [int(sizes.constant + sizes.at_half)]
    for number, (kept, peak) in enumerate((kept, peak) for count, kept, peak in groups for _ in range(count)):
        walked.append(live + peak - kept)
        live += int(sizes.first_mlp) * (number == 0) - kept - int(sizes.gone)
    assert max(map(int, moments(sizes, groups))) == max(walked if groups else [*walked, live])
