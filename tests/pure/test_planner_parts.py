"""Packed plans, and sequences that run whole because the caches of their slices do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from megatron_epp.cost import H100, ModelShape, analytic_costs
from megatron_epp.plan import InfeasibleError, Plan, PlanError, check, digest, lower
from megatron_epp.planner import Options, plan
from megatron_epp.planner.service.packed import PackedPlan
from tests.support.plan.planner_cases import GIB, named_cap_bytes, problem
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import hybrid

# ---- packed plans: the plan and its lowered actions, rank by rank ----------------------------------------------------


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


# ---- sequences that run whole because the caches of their slices do not fit ------------------------------------------


LENGTHS = (100_000, 30_000, 20_000, *[700] * 80)
"""More than are tried whole in every order anyway."""
STAGES = 4
SHAPE = ModelShape(num_layers=48, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, vocab_size=4096)
COSTS = analytic_costs(SHAPE, H100, [12] * STAGES, state_bytes_per_parameter=2.0)
"""Many layers with as many key heads as query heads: caches of all of them are larger than one layer's activations."""


def least_cap(lengths: tuple[int, ...] = LENGTHS, **options: object) -> int:
    with pytest.raises(InfeasibleError) as error:
        plan(problem(lengths, STAGES, 1 << 30), COSTS, Options(**options))  # type: ignore[arg-type]
    return named_cap_bytes(error.value)


def test_whole_sequences_fit_where_their_slices_do_not():
    cap = least_cap()
    assert cap < least_cap(slices=8)
    made = plan(problem(LENGTHS, STAGES, cap), COSTS, Options())
    assert not check(made)
    assert any(chunk.segments == ((0, 0, LENGTHS[0]),) for chunk in made.chunks)


def test_such_plans_are_no_slower_than_1f1b_of_whole_sequences():
    rising = tuple(sorted(LENGTHS))
    cap = int(1.5 * least_cap(rising, planner="1f1b"))
    made = plan(problem(LENGTHS, STAGES, cap), COSTS, Options())
    plain = plan(problem(rising, STAGES, cap), COSTS, Options(planner="1f1b"))
    assert any(chunk.segments == ((0, 0, LENGTHS[0]),) for chunk in made.chunks)
    assert made.predicted.makespan_us <= plain.predicted.makespan_us


def test_an_error_of_a_planner_that_cuts_nothing_does_not_advise_smaller_chunks():
    with pytest.raises(InfeasibleError, match="no plan of '1f1b' fits a memory cap") as refused:
        plan(problem(LENGTHS, STAGES, 8 * GIB), COSTS, Options(planner="1f1b"))
    said = str(refused.value)
    assert ", or set planner to greedy, or lower context, " in said
    assert "chunk_tokens" not in said
