"""Measured runs next to their plans; a run passes where it is as near to the reference as Megatron's own."""

import json
import math

import pytest

from megatron_epp.cli.first_run.training import deviation
from megatron_epp.plan.action import Action
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Event, Measured, measured_boxes
from tests.support.plan.report_plans import measured_run, sliced_plan


def test_a_measurement_survives_its_file(tmp_path):
    measured = measured_run(sliced_plan())
    measured.save(tmp_path / "run.json")
    assert Measured.load(tmp_path / "run.json") == measured


def test_processor_times_survive_the_file_where_there_are_some(tmp_path):
    measured = measured_run(sliced_plan())
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


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.update(schema="other"), "other"),
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.pop("plan_digest"), "plan_digest"),
        (lambda d: d["ranks"][0].append(["0F0", 5.0, 1.0]), "0F0 starts at 5.0 us and ends at 1.0 us"),
        (lambda d: d["ranks"][0].append(["0F0", 0.0, float("nan")]), "NaN"),
        (lambda d: d["ranks"][0].append(["0Q0", 0.0, 1.0]), "0Q0"),
        (lambda d: d["ranks"][0].append(["0F0", 0.0]), "not a measurement"),
    ],
)
def test_a_malformed_measurement_is_refused_with_what_is_wrong(tmp_path, change, complaint):
    data = json.loads(measured_run(sliced_plan()).to_json())
    change(data)
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=complaint) as caught:
        Measured.load(tmp_path / "run.json")
    assert "run.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", '"text"', "{"])
def test_text_that_is_no_measurement_is_refused(text):
    with pytest.raises(PlanError, match="not a measurement"):
        Measured.from_json(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"absent\.json"):
        Measured.load(tmp_path / "absent.json")


def test_a_run_of_another_plan_is_refused_with_both_digests():
    plan, other = sliced_plan(), sliced_plan(recompute=0)
    measured = measured_run(other)
    with pytest.raises(PlanError, match=measured.plan_digest[:12]):
        measured_boxes(plan, measured)


def test_a_run_on_another_number_of_ranks_is_refused():
    plan = sliced_plan()
    measured = measured_run(plan)
    with pytest.raises(PlanError, match="1 ranks, the plan has 2"):
        measured_boxes(plan, Measured(measured.plan_digest, measured.ranks[:1]))


# ---- as near to the reference as Megatron's own, or near enough anyway -----------------------------------------------


def test_twice_as_far_as_megatrons_own_is_allowed_and_more_is_not():
    near = deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0079], floor=1e-6)
    assert near.theirs == pytest.approx(1e-3)
    assert near.allowed == pytest.approx(2e-3)
    assert near.holds
    assert not deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0081], floor=1e-6).holds


def test_where_megatrons_own_is_exact_the_floor_is_allowed():
    assert deviation([2.0], [2.0], [2.00001], floor=1e-5).holds
    assert not deviation([2.0], [2.0], [2.0001], floor=1e-5).holds


def test_a_loss_that_is_not_a_number_passes_nowhere():
    found = deviation([2.0, 2.0], [2.0, 2.0], [2.0, math.nan], floor=1.0)
    assert math.isinf(found.ours)
    assert not found.holds
