"""Host memory of a plan: keys and values of slices and offloaded activations are counted and held against the cap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, KVOffload, Op, check, simulate
from megatron_epp.plan.kv_offload import HOST_UNIT_BYTES, host_memory, host_peaks, in_units, kv_offload_changes, slices_of
from megatron_epp.plan.lowering import lower
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import evaluation, faults, make_plan, only_fault, sliced, whole


def times_of(line, rank, action):
    at = line.plan.actions(rank).index(action)
    return line.start_us[rank][at], line.end_us[rank][at]


UNIT = HOST_UNIT_BYTES


def test_keys_and_values_are_there_from_the_first_slices_forward_and_their_gradient_from_the_last_slices_backward():
    line = simulate(replace(sliced(), kv_offload=(KVOffload(1, 0, 40, 2 * UNIT),)))
    begin, _ = times_of(line, 1, Action(Op.F, 1, 0))
    turn, _ = times_of(line, 1, Action(Op.B, 1, 1))
    _, end = times_of(line, 1, Action(Op.B, 1, 0))
    assert host_memory(line, 1) == [(0.0, 0), (begin, UNIT), (turn, 3 * UNIT), (end, 0)]
    assert host_peaks(line) == (0, 3 * UNIT)


def test_without_backward_they_go_with_the_last_slices_forward():
    line = simulate(replace(evaluation(), kv_offload=(KVOffload(0, 0, 40, 50),)))
    assert host_memory(line, 0) == [(0.0, 0), (0.0, UNIT), (times_of(line, 0, Action(Op.F, 0, 1))[1], 0)]


def test_what_is_offloaded_is_there_from_where_its_offload_is_issued_to_where_its_load_is():
    """0O1 and 0L0 run next to 0F2, which starts at 20, and 0L1 next to 0B2."""
    line = simulate(make_plan(["0F0 0F1 0F2 0B2 0B0 0B1"], whole(2, 2, 2), copies=["0O0 0O1 0L0 0L1"], offload_share=0.5))
    assert host_memory(line, 0) == [(0.0, 0), (10.0, UNIT), (20.0, 2 * UNIT), (20.0, UNIT), (30.0, 0)]


def test_a_rank_with_more_at_the_host_than_it_may_have_is_found():
    plan = replace(sliced(), kv_offload=(KVOffload(0, 0, UNIT, 2), KVOffload(1, 0, UNIT, 2)))
    cap = 2 * UNIT
    assert check(replace(plan, host_cap_bytes=(cap, cap))) == []
    assert only_fault(replace(plan, host_cap_bytes=(cap, cap - 1))).endswith(f" us, 1 above the cap of {cap - 1}")
    assert only_fault(replace(plan, host_cap_bytes=(cap,))) == "host_cap_bytes has 1 entries for 2 ranks"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (KVOffload(2, 0, 1, 1), "keys and values of sequence 0 in host memory of stage 2: there are 2 stages"),
        (KVOffload(0, 1, 1, 1), "keys and values of sequence 1 in host memory of stage 0: the sequence is not cut into slices"),
        (KVOffload(0, 7, 1, 1), "keys and values of sequence 7 in host memory of stage 0: the sequence is not cut into slices"),
        (KVOffload(0, 0, -1, 1), "keys and values of sequence 0 in host memory of stage 0 take -1 bytes and their gradient 1"),
    ],
)
def test_only_sequences_that_are_cut_can_have_theirs_there(entry, reason):
    assert reason in only_fault(replace(sliced(), kv_offload=(entry,)))


def test_once_on_each_stage():
    assert faults(replace(sliced(), kv_offload=(KVOffload(0, 0, 1, 1),) * 2)) == [
        "keys and values of sequence 0 in host memory of stage 0 are there twice"
    ]


@given(sound_plans(min_time=1), st.integers(0, 99), st.integers(0, 99))
def test_nothing_is_left_at_the_host(plan, cache, gradient):
    entries = tuple(
        KVOffload(stage, sequence, cache, gradient) for stage in range(plan.num_stages) for sequence in slices_of(plan)
    )
    line = simulate(replace(plan, kv_offload=entries))
    for rank in range(plan.num_ranks):
        levels = [size for _, size in host_memory(line, rank)]
        assert levels[-1] == 0
        assert min(levels) >= 0


@given(sound_plans(min_time=1, shared=True), st.integers(0, 9 * UNIT), st.integers(0, 9 * UNIT))
def test_in_the_order_of_a_run_there_is_as_much_at_the_host(plan, cache, gradient):
    """A run takes memory for an offload, and gives it back to others, when it issues the copies."""
    sizes = {action: 7 * UNIT * (1 + action.chunk) + 1 for row in plan.copies for action, *_ in row}
    copies = tuple(tuple(_moving(copy, sizes[copy.action]) for copy in row) for row in plan.copies)
    entries = [KVOffload(stage, sequence, cache, gradient) for stage in range(plan.num_stages) for sequence in slices_of(plan)]
    plan = replace(plan, copies=copies, kv_offload=tuple(entries))
    peaks, changes = host_peaks(simulate(plan)), list(kv_offload_changes(entries, slices_of(plan), plan.forward_only))
    for row, peak in zip(lower(plan), peaks, strict=True):
        here = most = 0
        for action in row:
            if action in sizes:
                here += in_units(sizes[action]) * (1 if action.op is Op.O else -1)
            here += sum(size for when, at_end, size in changes if when == action and not at_end)
            most = max(most, here)
            here += sum(size for when, at_end, size in changes if when == action and at_end)
        assert most == peak


def _moving(copy, size):
    moved = (0, size) if copy.action.op is Op.O else (size, 0)
    return copy._replace(alloc_bytes=moved[0], free_bytes=moved[1])
