"""The simulator: times by hand and by a second simulator, what it refuses, and the critical path in its graph."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan import critical_path as paths
from megatron_epp.plan.columns import byte_column
from megatron_epp.plan.critical_path import ABSENT_US, DependencyKind, binding_dependencies, critical_path
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.launches import Launches
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.plan import Copy
from megatron_epp.plan.proof.memory_balance import _balance, _chains, _is_balanced
from megatron_epp.plan.relations import deps
from megatron_epp.plan.simulation import simulate
from tests.support.calls import refusal
from tests.support.plan import second_simulator
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.report_plans import predicted, sliced_plan, v_shaped_plan, with_offload
from tests.support.plan.small_plans import make_plan, one_f_one_b, only_fault, whole, with_rows, with_step


@given(sound_plans(min_time=1, shared=True))
def test_a_link_serves_whoever_comes_first_in_either_direction(plan):
    line = simulate(plan)
    ended = {}
    for table, ends in ((plan.ranks, line.end_us), (plan.copies, line.copy_end_us)):
        for rank, steps in enumerate(table):
            ended |= {tuple(step.action): end for step, end in zip(steps, ends[rank], strict=True)}
    needs = list(second_simulator.waited_for(plan))
    lanes = {}
    for rank, steps in enumerate(plan.copies):
        before_us = 0.0
        for copy, start_us, end_us in zip(steps, line.copy_start_us[rank], line.copy_end_us[rank], strict=True):
            awaited = [ended[first] for first, then, _ in needs if then == tuple(copy.action)]
            awaited += [] if copy.after is None else [ended[tuple(copy.after)]]
            came_us = max(before_us, *awaited)
            lanes.setdefault((plan.host_links[rank], copy.action.op), []).append((came_us, rank, start_us, end_us))
            before_us = end_us
    for lane in lanes.values():
        free_us = 0.0
        for came_us, _, start_us, end_us in sorted(lane):
            assert start_us == max(came_us, free_us)
            free_us = end_us


def test_a_workspace_counts_while_its_action_runs():
    plan = with_step(make_plan(["0F0 0B0"], whole(4)), "0B0", alloc_bytes=7, free_bytes=47)
    assert simulate(plan).peak_bytes == (147,)
    assert simulate(with_step(plan, "0B0", time_us=0.0)).peak_bytes == (147,)


def test_a_deadlock_names_what_every_blocked_rank_waits_for():
    plan = with_rows(make_plan(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], whole(2, 2)), "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    assert refusal(simulate, plan, error=PlanError) == (
        "the order deadlocks: rank 0 at position 1: 0B0 waits for 1B0 (rank 1, position 3); "
        "rank 1 at position 0: 1F1 waits for 0F1 (rank 0, position 2)"
    )


def test_a_missing_or_doubled_action_is_refused():
    with pytest.raises(PlanError, match="1F2 needs 0F2, which the plan does not have"):
        simulate(with_rows(one_f_one_b(), "0F0 0F1", "1F0 1F2"))
    with pytest.raises(PlanError, match="0F0 occurs more than once"):
        simulate(with_rows(one_f_one_b(), "0F0 0F0"))


@given(sound_plans())
def test_times_are_the_least_that_respect_every_dependency(plan):
    start, took = second_simulator.times(plan)
    line = simulate(plan)
    for table, starts, ends in ((plan.ranks, line.start_us, line.end_us), (plan.copies, line.copy_start_us, line.copy_end_us)):
        for rank, steps in enumerate(table):
            assert starts[rank] == tuple(start[tuple(step.action)] for step in steps)
            assert ends[rank] == tuple(start[tuple(step.action)] + step.time_us for step in steps)
    assert line.makespan_us == max(start[a] + took[a] for a in start)
    assert 0.0 <= line.bubble_fraction <= 1.0


@given(sound_plans(min_time=1))
def test_live_bytes_are_those_of_all_changes_sorted_by_time(plan):
    start, took = second_simulator.times(plan)
    line = simulate(plan)
    for rank, static in enumerate(plan.static_bytes):
        found = sorted((when, size) for when, size in second_simulator.changes(plan, rank, start, took) if size)
        totals = accumulate((size for _, size in found), initial=static)
        assert line.live_bytes(rank) == list(zip((0.0, *(when for (when, *_), _ in found)), totals, strict=True))
        assert line.live_bytes(rank)[-1][1] == static


@given(sound_plans(shared=True))
def test_live_bytes_are_in_the_order_of_time_even_where_steps_take_none(plan):
    line = simulate(plan)
    for rank in range(plan.num_ranks):
        times = [time_us for time_us, _ in line.live_bytes(rank)]
        assert times == sorted(times)


@settings(max_examples=25)
@given(sound_plans())
def test_steps_wait_for_what_the_table_of_operations_says(plan):
    graph = build_graph(plan)
    listed = {action for _, table in plan.tables for steps in table for step in steps for action in step.actions}
    needs = deps(plan.chunks, plan.num_stages, listed, plan.placement, plan.loss_groups)
    for number, step in enumerate(graph.steps):
        issue = [step.after] if getattr(step, "after", None) else []
        wanted = [*issue, *(need for action in step.actions for need in needs(action))]
        assert [need for need, _ in graph.needs_of(number)] == [graph.listed.number(need) for need in wanted]


@settings(max_examples=25)
@given(sound_plans())
def test_columns_of_launches_have_the_rows_of_the_lowered_plan(plan):
    rows = lower(plan)
    assert Launches.of(rows).rows() == rows


def test_sums_of_bytes_are_exact():
    assert np.cumsum(byte_column([1 << 62, 1 << 62, (1 << 62) + 1])).tolist() == [1 << 62, 1 << 63, 3 * (1 << 62) + 1]
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
    assert graph.listed.number(action) == 0
    assert graph.listed.number(action._replace(chunk=99)) is None
    assert graph.listed.number(action._replace(stage=99)) is None
    with pytest.raises(PlanError, match="is of a stage that the plan does not have; it has"):
        build_graph(with_step(plan, "0F0", action=action._replace(stage=99)))


def solved(plan):
    graph, timeline = build_graph(plan), simulate(plan)
    starts, ends = paths.times_of(timeline)
    return graph, starts, ends, binding_dependencies(graph, starts, ends)


def binding_of(plan, text):
    graph, _, _, found = solved(plan)
    dependency = found[graph.listed.number(Action.parse(text))]
    return dependency.kind, None if dependency.number < 0 else str(graph.steps[dependency.number].action)


@pytest.mark.parametrize(
    "plan", [sliced_plan(num_ranks=4, slices=3, batched=5), v_shaped_plan(), with_offload(sliced_plan(slices=4), 0)]
)
def test_every_step_starts_when_what_it_waits_for_is_there_and_times_along_the_critical_path_add_up_to_the_makespan(plan):
    graph, starts, ends, found = solved(plan)
    for start_us, dependency in zip(starts, found, strict=True):
        assert start_us == (ends[dependency.number] + dependency.transfer_us if dependency.number >= 0 else 0.0)
    path = critical_path(found, ends)
    total_us = sum(graph.steps[number].time_us + found[number].transfer_us for number in path)
    assert total_us == pytest.approx(simulate(plan).makespan_us)
    assert found[path[0]].kind is DependencyKind.START


def test_what_a_step_waits_for_is_named():
    plan, offloading = sliced_plan(num_ranks=2, slices=2, batched=2), with_offload(sliced_plan(), chunk=0)
    offload, load = offloading.copies[0]
    slow = predicted(replace(offloading, copies=((offload, load._replace(time_us=50_000.0)), ())))
    copies = [(Copy(Action(Op.O, rank, 0), 9_000.0, 0, 1024), Copy(Action(Op.L, rank, 0), 10.0, 1024, 0)) for rank in (0, 1)]
    shared = predicted(replace(plan, copies=tuple(copies), host_links=(0, 0)))
    for of_plan, action, kind, awaited in (
        (plan, "0F0", DependencyKind.START, None),
        (plan, "0F1", DependencyKind.ORDER, "0F0"),
        (plan, "1F0", DependencyKind.TRANSFER, "0F0"),
        (plan, "0B1", DependencyKind.TRANSFER, "1B1"),
        (v_shaped_plan(), "2F0", DependencyKind.ORDER, "1F0"),
        (slow, "0B0", DependencyKind.NEED, "0L0"),  # the load of its activations
        (shared, "1O0", DependencyKind.HOST_LINK, "0O0"),  # which ranks share
    ):
        assert binding_of(of_plan, action) == (kind, awaited)


def test_transfers_are_found_by_the_steps_that_they_join():
    graph, _, _, found = solved(sliced_plan())
    for number, dependency in enumerate(found):
        if dependency.kind is DependencyKind.TRANSFER:
            assert paths.transfers_between(graph)[dependency.number, number].time_us == dependency.transfer_us


def test_steps_of_which_no_times_are_known_delay_none():
    plan = with_offload(sliced_plan(), chunk=0)
    graph, starts, ends, _ = solved(plan)
    copies = graph.tracks[plan.num_ranks].start
    found = binding_dependencies(graph, [*starts[:copies], ABSENT_US, ABSENT_US], [*ends[:copies], ABSENT_US, ABSENT_US])
    assert all(dependency.number < copies for dependency in found[:copies])
    assert critical_path([paths.BindingDependency(DependencyKind.START)], [3.0]) == [0]
