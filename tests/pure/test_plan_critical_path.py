"""Binding dependencies of steps, and the critical path."""

from dataclasses import replace

import pytest

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.critical_path import (
    ABSENT_US,
    BindingDependency,
    DependencyKind,
    binding_dependencies,
    critical_path,
    times_of,
    transfers_between,
)
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.plan import Copy
from megatron_epp.plan.simulate import simulate
from tests.support.plan.report_plans import predicted, sliced_plan, v_shaped_plan, with_offload


def solved(plan):
    graph, timeline = build_graph(plan), simulate(plan)
    starts, ends = times_of(timeline)
    return graph, starts, ends, binding_dependencies(graph, starts, ends)


def binding_of(plan, text):
    graph, _, _, found = solved(plan)
    dependency = found[graph.number(Action.parse(text))]
    return dependency.kind, None if dependency.number < 0 else str(graph.steps[dependency.number].action)


@pytest.mark.parametrize(
    "plan", [sliced_plan(num_ranks=4, slices=3, batched=5), v_shaped_plan(), with_offload(sliced_plan(slices=4), 0)]
)
def test_every_step_starts_when_the_condition_that_it_waits_for_is_met(plan):
    _, starts, ends, found = solved(plan)
    for start_us, dependency in zip(starts, found, strict=True):
        assert start_us == (ends[dependency.number] + dependency.transfer_us if dependency.number >= 0 else 0.0)


@pytest.mark.parametrize("plan", [sliced_plan(num_ranks=4, slices=3, batched=5), v_shaped_plan()])
def test_the_times_along_the_critical_path_add_up_to_the_makespan(plan):
    graph, _, ends, found = solved(plan)
    path = critical_path(found, ends)
    total_us = sum(graph.steps[number].time_us + found[number].transfer_us for number in path)
    assert total_us == pytest.approx(simulate(plan).makespan_us)
    assert found[path[0]].kind is DependencyKind.START


def test_what_a_step_waits_for_is_named():
    plan = sliced_plan(num_ranks=2, slices=2, batched=2)
    assert binding_of(plan, "0F0") == (DependencyKind.START, None)
    assert binding_of(plan, "0F1") == (DependencyKind.ORDER, "0F0")
    assert binding_of(plan, "1F0") == (DependencyKind.TRANSFER, "0F0")
    assert binding_of(plan, "0B1") == (DependencyKind.TRANSFER, "1B1")
    assert binding_of(v_shaped_plan(), "2F0") == (DependencyKind.ORDER, "1F0")


def test_a_backward_can_wait_for_the_load_of_its_activations():
    plan = with_offload(sliced_plan(), chunk=0)
    offload, load = plan.copies[0]
    slow = replace(plan, copies=((offload, load._replace(time_us=50_000.0)), ()))
    assert binding_of(predicted(slow), "0B0") == (DependencyKind.NEED, "0L0")


def test_copies_wait_for_a_link_to_the_host_that_ranks_share():
    plan = sliced_plan(num_ranks=2)
    copies = tuple(
        (Copy(Action(Op.O, rank, 0), 9_000.0, 0, 1024), Copy(Action(Op.L, rank, 0), 10.0, 1024, 0)) for rank in range(2)
    )
    shared = predicted(replace(plan, copies=copies, host_links=(0, 0)))
    assert binding_of(shared, "1O0") == (DependencyKind.HOST_LINK, "0O0")


def test_transfers_are_found_by_the_steps_that_they_join():
    graph, _, _, found = solved(sliced_plan())
    for number, dependency in enumerate(found):
        if dependency.kind is DependencyKind.TRANSFER:
            assert transfers_between(graph)[dependency.number, number].time_us == dependency.transfer_us


def test_steps_of_which_no_times_are_known_delay_none():
    plan = with_offload(sliced_plan(), chunk=0)
    graph, starts, ends, _ = solved(plan)
    copies = graph.tracks[plan.num_ranks].start
    found = binding_dependencies(graph, [*starts[:copies], ABSENT_US, ABSENT_US], [*ends[:copies], ABSENT_US, ABSENT_US])
    assert all(dependency.number < copies for dependency in found[:copies])
    assert critical_path([BindingDependency(DependencyKind.START)], [3.0]) == [0]
