"""Plans of the greedy planner, refined by the exact one."""

import logging
from dataclasses import replace

import pytest

from megatron_epp.contrib.exact.oracle import makespan_us
from megatron_epp.contrib.exact.refine import MOST_CHUNKS, milp
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import InfeasibleError, Op
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.result import greedy
from megatron_epp.tools.formulas import H100, analytic_profile, library
from tests.support.plan.planner_cases import least_cap_bytes, pipeline, problem
from tests.support.seeds import some_by_default

pytest.importorskip("ortools", reason="the solver needs OR-tools: pip install 'megatron-epp[milp]'")

LENGTHS = (9000, 700, 16_000)
COSTS = pipeline(2, 2)
OPTIONS = Options(planner="milp", slices=2, plan_limit_s=20)


def shared(tensor_parallel: int, shares: tuple[float, ...] = ()) -> PipelineCosts:
    """Return costs of two stages whose layers some ranks share, and the output layer the stages, by these shares."""
    shape = library.shape_of(
        library.load_flags("llama3-8b") | {"num_layers": 16, "tensor_model_parallel_size": tensor_parallel}
    )
    return analytic_profile(shape, H100).costs([8, 8], state_bytes_per_parameter=7.5, vocabulary_shares=shares)


def test_what_only_offload_makes_fit_is_refined_too():
    costs, options = pipeline(2), replace(OPTIONS, offload=True, slices=8, plan_limit_s=1)
    with pytest.raises(InfeasibleError) as error:
        plan(problem([60_000], 2, 1), costs, replace(options, offload=False, planner="greedy"))
    asked = problem([60_000], 2, int(0.9 * (error.value.least_cap_bytes or 0)))
    found, start = milp(asked, costs, options), greedy(asked, costs, options)
    assert len(found.chunks) <= MOST_CHUNKS
    assert any(found.copies)
    made, before = (build_plan(asked, costs, options, one) for one in (found, start))
    assert check(made) == []
    assert made.predicted.makespan_us <= before.predicted.makespan_us


def test_a_fixed_recompute_is_kept():
    options = replace(OPTIONS, recompute=1, plan_limit_s=5)
    made = milp(problem(LENGTHS, 2), COSTS, options)
    assert {num_steps for row in made.recompute_steps for num_steps in row} == {1}


STAYING = {
    "more than 16 chunks": (problem((4000,) * (MOST_CHUNKS + 1), 2), COSTS, OPTIONS),
    "evaluations": (problem(LENGTHS, 2, forward_only=True), COSTS, OPTIONS),
}


@pytest.mark.parametrize("why", STAYING)
def test_what_the_exact_planner_does_not_know_stays_as_greedy_plans_it_and_a_line_says_why(
    why: str, caplog: pytest.LogCaptureFixture
):
    asked, costs, options = STAYING[why]
    with caplog.at_level(logging.INFO):
        made = milp(asked, costs, options)
    assert made == greedy(asked, costs, options)
    (said,) = caplog.messages
    assert said.startswith("the plan is greedy's, the exact planner looks for no better one: ")
    assert why in said


SHARDED, EXCHANGING = shared(2, (0.5, 0.5)), shared(8)


@some_by_default("split", [True, False], 1)
def test_shards_of_the_vocabulary_are_refined(split: bool):
    asked = problem((12_000, 4000, 2000, 500), 2)
    options = Options(chunk_tokens=9500, split_weight=split, plan_limit_s=20)
    start, like = greedy(asked, SHARDED, options), milp(asked, SHARDED, options)
    assert {action.op for row in like.order for action in row} >= {Op.S, Op.N, Op.T}
    assert check(build_plan(asked, SHARDED, options, like)) == []
    times_us = [makespan_us(asked, SHARDED, options, one) for one in (like, start)]
    assert times_us[0] < times_us[1]


def test_neighbours_in_a_refined_order_are_joined_where_exchanges_are_overlapped(caplog: pytest.LogCaptureFixture):
    asked, options = problem((4096,) * 6, 2), Options(slices=1, chunk_tokens=4096, overlap_exchanges=True, plan_limit_s=5)
    start = greedy(asked, EXCHANGING, options)
    with caplog.at_level(logging.INFO):
        made = milp(asked, EXCHANGING, options)
    assert made.joined
    assert "greedy's" not in caplog.text
    assert check(build_plan(asked, EXCHANGING, options, made)) == []
    assert makespan_us(asked, EXCHANGING, options, made) <= makespan_us(asked, EXCHANGING, options, start)


def test_under_a_cap_a_batch_is_refined_also_without_exchanges_to_overlap(caplog: pytest.LogCaptureFixture):
    lengths = (16_000, 9000, 3000, 700)
    asked = problem(lengths, 2, int(1.02 * least_cap_bytes(problem(lengths, 2), COSTS, Options(slices=2))))  # above the least
    options = replace(OPTIONS, overlap_exchanges=True)
    with caplog.at_level(logging.INFO):
        made = milp(asked, COSTS, options)
    assert made == milp(asked, COSTS, OPTIONS)
    assert check(build_plan(asked, COSTS, options, made)) == []
    assert makespan_us(asked, COSTS, options, made) < 0.999 * makespan_us(asked, COSTS, options, greedy(asked, COSTS, options))
    assert "greedy's" not in caplog.text


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)], ids=["looped", "v"])
def test_several_stages_on_a_rank_are_refined(placement: tuple[int, ...]):
    asked = replace(problem(LENGTHS, 4), placement=placement, cap_bytes=(1 << 40,) * 2)
    costs = pipeline(4, 2)
    options = replace(OPTIONS, split_weight=True, plan_limit_s=2)
    made, before = (
        build_plan(asked, costs, options, one) for one in (milp(asked, costs, options), greedy(asked, costs, options))
    )
    assert check(made) == []
    assert made.predicted.makespan_us <= before.predicted.makespan_us
