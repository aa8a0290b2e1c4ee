"""`check` holds what a plan predicts against its simulation."""

import math
from dataclasses import replace

import pytest
from hypothesis import given

from megatron_epp.plan import Prediction, check, from_json, simulate, to_json
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.report_plans import predicted
from tests.support.plan.small_plans import EXAMPLES, faults, offload, only_fault

SOUND = predicted(offload())


def saying(**changes):
    return replace(SOUND, predicted=replace(SOUND.predicted, **changes))


@given(sound_plans())
def test_the_simulators_own_numbers_are_right_in_a_file_too(plan):
    assert check(from_json(to_json(predicted(plan)))) == []


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_a_plan_that_predicts_nothing_is_sound(example):
    assert example().predicted == Prediction.none(example().num_ranks)
    assert check(example()) == []


@pytest.mark.parametrize("share", [0.0, 0.5, 1.001, math.inf, math.nan])
def test_a_wrong_makespan_and_a_wrong_bubble(share):
    timeline = simulate(SOUND)
    makespan_us, bubble = timeline.makespan_us * share, timeline.bubble_fraction * share
    found = f"predicted.makespan_us is {makespan_us}; the simulator finds {timeline.makespan_us}"
    assert only_fault(saying(makespan_us=makespan_us)) == found
    found = f"predicted.bubble_fraction is {bubble}; the simulator finds {timeline.bubble_fraction}"
    assert only_fault(saying(bubble_fraction=bubble)) == found


@pytest.mark.parametrize("share", [-1.0, 1.001, math.nan])
def test_a_lower_bound_that_is_none(share):
    makespan_us = SOUND.predicted.makespan_us
    reason = f"predicted.lower_bound_us is {makespan_us * share}; it is within 0 and the makespan of {makespan_us}"
    assert only_fault(saying(lower_bound_us=makespan_us * share)) == reason


@pytest.mark.parametrize("off_bytes", [-1, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_peak_that_is_off_by_a_byte(rank, off_bytes):
    peaks = SOUND.predicted.peak_bytes
    wrong = tuple(peak + off_bytes * (r == rank) for r, peak in enumerate(peaks))
    assert only_fault(saying(peak_bytes=wrong)) == (
        f"rank {rank}: predicted.peak_bytes is {wrong[rank]}; the simulator finds {peaks[rank]}"
    )


def test_sums_in_another_order_are_no_fault():
    one = SOUND.predicted
    assert check(saying(makespan_us=math.nextafter(one.makespan_us, 0.0), bubble_fraction=one.bubble_fraction + 1e-15)) == []


def test_a_plan_whose_times_are_changed_by_hand_no_longer_takes_what_it_says():
    slow = tuple(tuple(step._replace(time_us=2 * step.time_us) for step in row) for row in SOUND.ranks)
    assert any("predicted.makespan_us" in fault for fault in faults(replace(SOUND, ranks=slow)))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_of_a_lower_bound_no_more_is_held_than_that_it_is_not_above_the_makespan(share):
    assert check(saying(lower_bound_us=share * SOUND.predicted.makespan_us)) == []
