"""Measured runs next to their plans; a run passes where it is as near to the reference as Megatron's own."""

import math

import pytest

from megatron_epp.cli.first_run.training import deviation
from megatron_epp.plan.action import Action
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Event, Measured
from tests.support.plan.report_plans import measured_run, sliced_plan


def test_a_measurement_survives_its_file_with_its_processor_times_where_there_are_some(tmp_path):
    measured = measured_run(sliced_plan())
    measured.save(tmp_path / "run.json")
    assert Measured.load(tmp_path / "run.json") == measured
    first, *rest = measured.ranks[0]
    measured = Measured(measured.plan_digest, ((first._replace(cpu_us=7.5), *rest), *measured.ranks[1:]))
    measured.save(tmp_path / "run.json")
    loaded = Measured.load(tmp_path / "run.json")
    assert loaded == measured
    assert [event.cpu_us for event in loaded.ranks[0]] == [7.5, *[None] * len(rest)]


def test_makespan_and_bubble_of_a_run_are_those_of_its_events():
    action = Action.parse
    measured = Measured(
        "d", ((Event(action("0F0"), 0.0, 30.0), Event(action("0SEND_F0"), 30.0, 40.0)), (Event(action("1F0"), 40.0, 100.0),))
    )
    assert measured.makespan_us == 100.0
    assert measured.bubble_fraction == pytest.approx(1 - (30 + 60) / 200), "messages are not compute"


def test_a_run_at_the_planned_speed_has_the_planned_bubble():
    plan = sliced_plan(num_ranks=4)
    measured, timeline = measured_run(plan, slowdown=1.0), simulate(plan)
    assert measured.makespan_us == timeline.makespan_us
    assert measured.bubble_fraction == pytest.approx(timeline.bubble_fraction)


# ---- as near to the reference as Megatron's own, or near enough anyway -----------------------------------------------


def test_twice_as_far_as_megatrons_own_or_the_floor_is_allowed_and_no_more():
    near = deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0079], floor=1e-6)
    assert near.theirs == pytest.approx(1e-3)
    assert near.allowed == pytest.approx(2e-3)
    assert near.holds
    assert not deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0081], floor=1e-6).holds
    assert deviation([2.0], [2.0], [2.00001], floor=1e-5).holds
    assert not deviation([2.0], [2.0], [2.0001], floor=1e-5).holds
    found = deviation([2.0, 2.0], [2.0, 2.0], [2.0, math.nan], floor=1.0)
    assert math.isinf(found.ours)
    assert not found.holds
