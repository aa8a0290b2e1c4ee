"""A stage is slow if it takes longer than planned in each of several iterations, and costs what the simulator says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_epp.cost import CPU, ModelShape, analytic_profile
from megatron_epp.cost.slowness import ITERATIONS, SLOWER, SlowStages, slowed_us
from megatron_epp.plan import UNLIMITED_BYTES, Action, Op, Plan, simulate
from megatron_epp.planner import Options, Problem, plan
from tests.support.plan.small_plans import one_f_one_b

PLAN = one_f_one_b()
SLOW = 2 * SLOWER


def took(plan: Plan, rank: int, factor: float) -> Iterator[tuple[Action, float]]:
    """Measured times of a rank whose actions take `factor` of their planned time; waits for messages do not count."""
    yield plan.ranks[rank][0].action._replace(op=Op.RECV_F), 1e9
    for step in plan.ranks[rank]:
        yield step.action, factor * step.time_us


def watched(factors: list[float], rank: int = 1) -> SlowStages:
    stages = SlowStages()
    for factor in factors:
        stages.add(PLAN, rank, took(PLAN, rank, factor))
    return stages


def test_a_stage_that_is_slow_for_long_is_found_with_its_ratio() -> None:
    assert watched([SLOW] * (ITERATIONS - 1)).slow == {}
    assert watched([1.0, *[SLOW] * ITERATIONS]).slow == {1: pytest.approx(SLOW)}
    assert watched([9.0] * ITERATIONS + [SLOW] * ITERATIONS).slow == {1: pytest.approx(SLOW)}


@pytest.mark.parametrize("factor", [0.5, 1.0, 0.99 * SLOWER])
def test_one_iteration_at_its_costs_begins_the_count_again(factor: float) -> None:
    assert watched([SLOW] * (ITERATIONS - 1) + [factor] + [SLOW] * (ITERATIONS - 1)).slow == {}
    assert watched([SLOW] * ITERATIONS + [factor]).slow == {}


def test_passes_of_vocabulary_shards_are_of_ranks_and_no_stage_is_named_for_them() -> None:
    """The loss of chunks, whose time is assumed, has the number of the first stage on the last rank."""
    shape = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=5000)
    costs = analytic_profile(shape, CPU).costs([2, 2], vocabulary_shares=(0.5, 0.5))
    made, stages = plan(Problem((40, 30, 20), (0, 1), (UNLIMITED_BYTES,) * 2), costs, Options()), SlowStages()
    for _ in range(ITERATIONS):
        stages.add(
            made, 1, [(action, 9.0 * time if action.op in (Op.S, Op.N, Op.T) else time) for action, time in took(made, 1, 1.0)]
        )
    assert {step.action.stage for step in made.ranks[1] if step.action.op is Op.N} == {0}
    assert stages.slow == {}


def test_a_slow_stage_costs_what_a_simulation_says() -> None:
    assert slowed_us(PLAN, {}) == simulate(PLAN).makespan_us
    assert slowed_us(PLAN, {0: 1.0, 1: SLOW}) > slowed_us(PLAN, {1: 1.5}) > slowed_us(PLAN, {})
    assert slowed_us(PLAN, dict.fromkeys(range(PLAN.num_stages), 1e6)) > 1e5 * slowed_us(PLAN, {})
