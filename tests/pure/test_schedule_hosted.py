"""What a plan has at the host: keys and values of slices, and what is offloaded; counted, and held against the cap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_plans import evaluation, faults, offload, only_fault, sliced
from schedule_random import sound_plans

from megatron_epp.schedule import Action, Hosted, Op, check, simulate
from megatron_epp.schedule.hosted import host_levels, host_peaks, slices_of


def times_of(line, rank, action):
    at = line.plan.actions(rank).index(action)
    return line.start_us[rank][at], line.end_us[rank][at]


def test_keys_and_values_are_there_from_the_first_slices_forward_and_their_gradient_from_the_last_slices_backward():
    line = simulate(replace(sliced(), hosted=(Hosted(1, 0, 40, 50),)))
    begin, _ = times_of(line, 1, Action(Op.F, 1, 0))
    turn, _ = times_of(line, 1, Action(Op.B, 1, 1))
    _, end = times_of(line, 1, Action(Op.B, 1, 0))
    assert host_levels(line, 1) == [(0.0, 0), (begin, 40), (turn, 90), (end, 0)]
    assert host_peaks(line) == (0, 90)


def test_without_backward_they_go_with_the_last_slices_forward():
    line = simulate(replace(evaluation(), hosted=(Hosted(0, 0, 40, 50),)))
    assert host_levels(line, 0) == [(0.0, 0), (0.0, 40), (times_of(line, 0, Action(Op.F, 0, 1))[1], 0)]


def test_what_is_offloaded_is_there_from_the_start_of_its_offload_to_the_end_of_its_load():
    line = simulate(offload())
    (out, back), (_, end) = line.copy_start_us[0], line.copy_end_us[0]
    assert host_levels(line, 0) == [(0.0, 0), (out, 20), (end, 0)]
    assert back < end


def test_a_rank_with_more_at_the_host_than_it_may_have_is_found():
    plan = replace(sliced(), hosted=(Hosted(0, 0, 40, 50), Hosted(1, 0, 40, 50)))
    assert check(replace(plan, host_cap_bytes=(90, 90))) == []
    assert only_fault(replace(plan, host_cap_bytes=(90, 89))).endswith(" us, 1 above the cap of 89")
    assert only_fault(replace(plan, host_cap_bytes=(90,))) == "host_cap_bytes has 1 entries for 2 ranks"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Hosted(2, 0, 1, 1), "keys and values of sequence 0 at the host of stage 2: there are 2 stages"),
        (Hosted(0, 1, 1, 1), "keys and values of sequence 1 at the host of stage 0: the sequence is not cut into slices"),
        (Hosted(0, 7, 1, 1), "keys and values of sequence 7 at the host of stage 0: the sequence is not cut into slices"),
        (Hosted(0, 0, -1, 1), "keys and values of sequence 0 at the host of stage 0 take -1 bytes and their gradient 1"),
    ],
)
def test_only_sequences_that_are_cut_can_have_theirs_there(entry, reason):
    assert reason in only_fault(replace(sliced(), hosted=(entry,)))


def test_once_on_each_stage():
    assert faults(replace(sliced(), hosted=(Hosted(0, 0, 1, 1),) * 2)) == [
        "keys and values of sequence 0 at the host of stage 0 are there twice"
    ]


@given(sound_plans(min_time=1), st.integers(0, 99), st.integers(0, 99))
def test_nothing_is_left_at_the_host(plan, cache, gradient):
    entries = tuple(
        Hosted(stage, sequence, cache, gradient) for stage in range(plan.num_stages) for sequence in slices_of(plan)
    )
    line = simulate(replace(plan, hosted=entries))
    for rank in range(plan.num_ranks):
        levels = [size for _, size in host_levels(line, rank)]
        assert levels[-1] == 0
        assert min(levels) >= 0
