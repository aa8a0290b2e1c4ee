"""Baselines of the planner's benchmark as runs use them: one setting for all batches of a run, and for the worst one."""

from itertools import pairwise

import pytest

from megatron_epp.plan import InfeasibleError, Plan, PlanError
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.baselines.contest import chunk_sizes
from scripts.bench.planner.fixed import FIXED, FixedRun, fixed_run
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths

COSTS = pipeline(4)
STATIC = max(stage.static_bytes for stage in COSTS.stages)
CONTEXT = 20_000
LOOSE, TIGHT = STATIC + 60 * GIB, STATIC + 8 * GIB


def batch(seed: int, cap: int, longest: int = 9000) -> Problem:
    return problem((longest, *web_lengths(30, seed=seed, longest=longest)), 4, cap)


def batches(cap: int) -> list[Problem]:
    return [batch(seed, cap) for seed in range(3)]


def plans(name: str, found: FixedRun, asked: list[Problem]) -> list[Plan]:
    options = Options(planner=name, context=CONTEXT)
    return [build_plan(one, COSTS, options, made) for one, made in zip(asked, found.decisions, strict=True)]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("cap", [LOOSE, TIGHT])
def test_plans_fit_the_cap_take_what_was_said_and_are_never_faster_than_those_tuned_for_each_batch(name: str, cap: int):
    options = Options(planner=name, context=CONTEXT)
    found = fixed_run(batches(cap), [], COSTS, options)
    for one, made, took_us in zip(batches(cap), plans(name, found, batches(cap)), found.makespan_us, strict=True):
        assert max(made.predicted.peak_bytes) <= cap
        assert made.predicted.makespan_us == pytest.approx(took_us)
        assert made.predicted.makespan_us >= plan(one, COSTS, options).predicted.makespan_us * (1 - 1e-9)
    counts = {count for made in found.decisions for row in made.recompute_steps for count in row}
    assert found.setting.recompute is None or counts == {found.setting.recompute}, "the same for all batches and chunks"
    assert name == "chunkflow" or found.setting.recompute is not None


def test_no_setting_of_the_grid_is_better():
    """Every size with every recompute, planned one by one."""
    asked = batches(TIGHT)
    found = fixed_run(asked, [], COSTS, Options(planner="seq1f1b"))
    totals = []
    for size in chunk_sizes(max(asked, key=lambda one: sum(one.lengths)), Options()):
        for count in range(max(COSTS.num_layers) + 1):
            options = Options(planner="seq1f1b", chunk_tokens=size, recompute=count)
            try:
                totals.append(sum(plan(one, COSTS, options).predicted.makespan_us for one in asked))
            except InfeasibleError:
                continue
    assert len(totals) > 5
    assert sum(found.makespan_us) == pytest.approx(min(totals))


@pytest.mark.parametrize("name", ["seq1f1b", "chunkflow"])
def test_a_longer_worst_batch_costs_every_batch_time(name: str):
    options = Options(planner=name, context=CONTEXT)
    worst = ([], [batch(9, TIGHT, longest=14_000)], [batch(9, TIGHT, longest=CONTEXT)])
    totals = [sum(fixed_run(batches(TIGHT), some, COSTS, options).makespan_us) for some in worst]
    assert all(a <= b for a, b in pairwise(totals))
    assert totals[0] < totals[-1]


def test_what_fits_no_batch_and_a_planner_that_plans_every_batch_are_refused():
    with pytest.raises(InfeasibleError, match=f"memory cap of {STATIC + 1} bytes"):
        fixed_run(batches(STATIC + 1), [], COSTS, Options(planner="seq1f1b"))
    with pytest.raises(PlanError, match="infinipipe"):
        fixed_run(batches(LOOSE), [], COSTS, Options(planner="infinipipe"))
