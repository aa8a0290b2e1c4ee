"""A stage is slow if it takes longer than planned in each of several iterations, and costs what the simulator says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_epp.cost.slowness import ITERATIONS, SLOWER, SlowStages, slowed_us
from megatron_epp.plan import Action, Op, Plan, simulate
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
    assert watched([SLOW] * (ITERATIONS - 1)).found == {}
    assert watched([1.0, *[SLOW] * ITERATIONS]).found == {1: pytest.approx(SLOW)}
    assert watched([9.0] * ITERATIONS + [SLOW] * ITERATIONS).found == {1: pytest.approx(SLOW)}


@pytest.mark.parametrize("factor", [0.5, 1.0, 0.99 * SLOWER])
def test_one_iteration_at_its_costs_begins_the_count_again(factor: float) -> None:
    assert watched([SLOW] * (ITERATIONS - 1) + [factor] + [SLOW] * (ITERATIONS - 1)).found == {}
    assert watched([SLOW] * ITERATIONS + [factor]).found == {}


def test_a_slow_stage_costs_what_a_simulation_says() -> None:
    assert slowed_us(PLAN, {}) == simulate(PLAN).makespan_us
    assert slowed_us(PLAN, {0: 1.0, 1: SLOW}) > slowed_us(PLAN, {1: 1.5}) > slowed_us(PLAN, {})
    assert slowed_us(PLAN, dict.fromkeys(range(PLAN.num_stages), 1e6)) > 1e5 * slowed_us(PLAN, {})
