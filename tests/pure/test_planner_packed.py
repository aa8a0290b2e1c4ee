"""A packed plan is the plan and its lowered actions, rank by rank, and notices damage on its way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from megatron_epp.plan import Plan, PlanError, digest, lower
from megatron_epp.planner.service.packed import PackedPlan
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import hybrid


@given(sound_plans())
def test_a_packed_plan_is_the_plan_and_the_actions_of_every_rank(plan: Plan) -> None:
    packed = PackedPlan.of(plan, 1.5, tuple(range(len(plan.lengths))), 7)
    assert packed.plan() == plan
    assert tuple(packed.actions(rank) for rank in range(plan.num_ranks)) == lower(plan)
    assert packed.plan_digest == digest(plan)
    assert packed[3:] == (1.5, tuple(range(len(plan.lengths))), 7)


@pytest.mark.parametrize("damage", [lambda m: b"", lambda m: b"no plan", lambda m: m[:-9], lambda m: m[:20] + m[21:]])
def test_a_damaged_message_is_refused(damage: Callable[[bytes], bytes]) -> None:
    packed = PackedPlan.of(hybrid(), 0.0, ())
    with pytest.raises(PlanError, match="is no packed plan"):
        packed._replace(message=damage(packed.message)).plan()
    with pytest.raises(PlanError, match="is no packed plan"):
        packed._replace(rows=tuple(map(damage, packed.rows))).actions(0)
