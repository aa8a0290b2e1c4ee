"""Steps, actions and launches as columns, and the graph that is made from them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.plan import PlanError, deps, lower, simulate
from megatron_epp.plan.check.memory_balance import _balance, _chains, _is_balanced
from megatron_epp.plan.columns import byte_column
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.launches import Launches
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import one_f_one_b, only_fault, with_step


@settings(max_examples=25)
@given(sound_plans())
def test_steps_wait_for_what_the_table_of_operations_says(plan):
    graph = build_graph(plan)
    listed = {action for _, table in plan.tables for steps in table for step in steps for action in step.actions}
    needs = deps(plan.chunks, plan.num_stages, listed, plan.placement, plan.loss_groups)
    for number, step in enumerate(graph.steps):
        issue = [step.after] if getattr(step, "after", None) else []
        wanted = [*issue, *(need for action in step.actions for need in needs(action))]
        assert [need for need, _ in graph.needs_of(number)] == [graph.number(need) for need in wanted]


@settings(max_examples=25)
@given(sound_plans())
def test_columns_of_launches_have_the_rows_of_the_lowered_plan(plan):
    rows = lower(plan)
    assert Launches.of(rows).rows() == rows


def test_sums_of_bytes_are_exact():
    sizes = [1 << 62, 1 << 62, (1 << 62) + 1]
    assert np.cumsum(byte_column(sizes)).tolist() == [1 << 62, 1 << 63, 3 * (1 << 62) + 1]
    assert byte_column([1, 2]).dtype == np.int64


def test_a_step_with_more_bytes_than_64_bits_hold_is_above_its_cap():
    plan = with_step(one_f_one_b(), "0F1", alloc_bytes=(1 << 64) - 5)
    assert simulate(plan).peak_bytes[0] >= (1 << 64) - 5
    assert "never freed" in only_fault(replace(plan, cap_bytes=(1 << 65,) * plan.num_ranks))


@settings(max_examples=25)
@given(sound_plans(), st.data())
def test_bytes_that_pass_the_test_of_all_steps_at_once_pass_that_step_by_step(plan, data):
    positions_of = [(rank, position) for rank, row in enumerate(plan.ranks) for position in range(len(row))]
    rank, position = data.draw(st.sampled_from(positions_of))
    change = data.draw(st.sampled_from(["alloc_bytes", "free_bytes"]))
    step = plan.ranks[rank][position]._replace(**{change: data.draw(st.integers(0, 3))})
    ranks = [list(row) for row in plan.ranks]
    ranks[rank][position] = step
    timeline, chains = simulate(replace(plan, ranks=tuple(map(tuple, ranks)))), _chains(plan)
    assert not (_is_balanced(timeline, rank, chains) and list(_balance(timeline, rank, chains)))


def test_an_action_of_an_unknown_chunk_or_stage_has_no_number():
    plan = one_f_one_b()
    graph, action = build_graph(plan), plan.ranks[0][0].action
    assert graph.number(action) == 0
    assert graph.number(action._replace(chunk=99)) is None
    assert graph.number(action._replace(stage=99)) is None
    with pytest.raises(PlanError, match="is of a stage that the plan does not have; it has"):
        build_graph(with_step(plan, "0F0", action=action._replace(stage=99)))
