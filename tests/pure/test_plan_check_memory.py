"""`check` follows the bytes: caps, and what is freed twice, early or never."""

from dataclasses import replace

from hypothesis import given

from megatron_epp.plan import check, simulate
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import (
    faults,
    make_plan,
    offload,
    one_f_one_b,
    only_fault,
    sliced,
    two_by_two,
    whole,
    with_step,
)


def test_memory_above_the_cap():
    peak = simulate(one_f_one_b()).peak_bytes
    assert peak == (180, 140)
    assert check(replace(one_f_one_b(), cap_bytes=(180, 140))) == []
    assert faults(replace(one_f_one_b(), cap_bytes=(170, 139))) == [
        "rank 0 position 1 0F1: 180 bytes live at 10.0 us, 10 above the cap of 170 (the rank's peak is 180)",
        "rank 1 position 0 1F0: 140 bytes live at 11.0 us, 1 above the cap of 139 (the rank's peak is 140)",
    ]


def test_static_bytes_above_the_cap():
    assert only_fault(replace(one_f_one_b(), cap_bytes=(99, 1000))) == "rank 0: static bytes 100 are above the cap of 99"


@given(sound_plans())
def test_the_peak_is_the_least_cap_that_passes(plan):
    peak = simulate(plan).peak_bytes
    assert check(replace(plan, cap_bytes=peak)) == []
    for rank, most in enumerate(peak):
        short = tuple(most - (r == rank) for r, most in enumerate(peak))
        found = check(replace(plan, cap_bytes=short))
        assert [(fault.rank, "above the cap" in fault.reason) for fault in found] == [(rank, True)]


def test_bytes_that_are_never_freed():
    plan = with_step(two_by_two(), "1B0", free_bytes=15)
    assert only_fault(plan) == "rank 1: 5 bytes of stage 1, chunk 0 (and later slices of its sequence) are never freed"


def test_bytes_that_are_freed_twice():
    plan = with_step(two_by_two(), "0B0", free_bytes=25)
    assert simulate(plan).live_bytes(0)[-1] == (simulate(plan).end_us[0][-1], 95)  # others hide it while they are live
    assert only_fault(plan) == "rank 0 position 2 0B0: frees 25 bytes when only 20 of its stage and chunk are live"


def test_a_cache_freed_before_its_last_use():
    plan = with_step(with_step(sliced(), "0B1", free_bytes=30 + 40), "0B0", free_bytes=50 + 40)
    assert check(plan) == []  # moved within the sequence: the bytes add up
    plan = with_step(sliced(), "0F1", free_bytes=200)
    assert faults(plan)[0] == "rank 0 position 1 0F1: frees 200 bytes when only 120 of its stage and chunk are live"


def test_a_backward_that_reads_what_was_freed():
    plan = with_step(with_step(offload(), "0O0", free_bytes=40), "0L0", alloc_bytes=0)
    assert "loads 0 bytes; its offload moved 40" in faults(plan)[0]
    assert "0B0: reads what 0F0 kept, but all of it was freed before" in faults(plan)[1]


def test_an_offload_only_frees_and_a_load_only_allocates():
    assert faults(with_step(offload(), "0O0", alloc_bytes=3))[0] == "rank 0 copy position 0 0O0: an offload allocates 3 bytes"
    assert faults(with_step(offload(), "0L0", free_bytes=3))[0] == "rank 0 copy position 1 0L0: a load frees 3 bytes"


def test_a_weight_gradient_that_reads_what_its_backward_freed():
    plan = make_plan(["0F0 0B0 0W0"], whole(4))
    assert check(plan) == []
    plan = with_step(with_step(plan, "0B0", free_bytes=40), "0W0", free_bytes=0)
    assert only_fault(plan) == "rank 0 position 2 0W0: reads what 0F0 kept, but all of it was freed before"
