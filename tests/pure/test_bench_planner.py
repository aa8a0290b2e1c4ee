"""The planner's benchmark: its cases, what it keeps of them, and baselines as runs use them, with one setting for all batches.

`test_benches.py` runs it in its reduced form.
"""

import math
from itertools import pairwise

import pytest

from megatron_epp.plan import InfeasibleError, Plan, PlanError
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.baselines.contest import chunk_sizes
from megatron_epp.tools.formulas.library import load_flags, shape_of
from scripts.bench.planner.fixed import FIXED, FixedRun, fixed_run
from scripts.bench.planner.report import TUNED, against, text
from scripts.bench.planner.runs import BATCHES, RunCase
from scripts.bench.planner.suite import CAPS_GB, CONTEXTS, MODELS, STAGES, Case, all_cases, row, sampled_cases
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths

COSTS = pipeline(4)
STATIC = max(stage.static_bytes for stage in COSTS.stages)
CONTEXT = 20_000
LOOSE, TIGHT = STATIC + 60 * GIB, STATIC + 8 * GIB


def test_the_suite_has_the_loss_of_training_with_its_flags_weight_gradients_by_themselves_and_a_link_to_the_host():
    blocks = []
    for case in sampled_cases()[::8]:
        ranks = {"tensor_model_parallel_size": case.shape.tensor_parallel, "context_parallel_size": case.shape.context_parallel}
        trained = shape_of(load_flags(case.model) | ranks | {"seq_length": case.context})
        assert case.shape.loss_block_tokens == trained.loss_block_tokens
        blocks.append(trained.loss_block_tokens)
        assert case.costs.splits_weight
        assert case.costs.host_us(1 << 30) < math.inf
    assert any(blocks)


def test_a_run_has_several_batches_and_room_for_the_longest_sequence():
    case = RunCase("wikipedia", 1048576, 8, "llama3-8b", 40)
    assert len({problem.lengths for problem in case.batches}) == BATCHES
    assert case.batches[0].lengths == case.lengths
    assert max(case.worst.lengths) == case.longest > max(max(problem.lengths) for problem in case.batches)
    assert len(case.worst.lengths) == len(case.lengths)
    alone = Case("wikipedia", 1048576, 8, "llama3-8b", 40)
    assert case.shape.ranks > alone.shape.ranks, "its pipeline is made for its own batch"


def test_the_sample_covers_everything_evenly():
    cases = [case for case in sampled_cases() if case.lengths_like in ("wikipedia", "code", "agents")]
    assert set(cases) <= set(all_cases())
    assert len(set(cases)) == 30
    for field, values in (("context", CONTEXTS), ("stages", STAGES), ("model", MODELS), ("cap_gb", CAPS_GB)):
        counts = [sum(getattr(case, field) == value for case in cases) for value in values]
        assert sum(counts) == 30
        assert max(counts) - min(counts) <= 2


def test_batches_are_the_same_every_time_and_keep_to_the_context():
    for case in sampled_cases():
        lengths = type(case)(case.lengths_like, case.context, case.stages, case.model, case.cap_gb).lengths
        assert lengths == case.lengths
        assert 1 <= min(lengths) <= max(lengths) <= case.context


def test_a_case_that_nobody_can_plan_is_reported_as_such():
    case = all_cases()[0]
    hopeless = type(case)(case.lengths_like, 8192, 2, "llama3-8b", 1)
    rows = [{"case": TUNED} | row(hopeless, ("seq1f1b",))]
    assert against(rows, "seq1f1b")["both_have_a_plan"] == 0
    assert "None of 1 cases has a plan" in text(None, rows)
    assert "no plan" in text(None, rows)


# ---- one setting for all batches of a run, and for the worst that may come --------------------------------------------


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
