"""Violations as people read them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import check, report
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import make_plan, two_by_two, whole, with_rows, with_step


def test_the_report_puts_an_arrow_under_the_fault():
    plan = with_rows(two_by_two(), "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    assert report(plan, check(plan)[:2]).splitlines() == [
        "2 violations",
        "rank 0 | 0F0 0B0 0F1 0B1",
        "             ^^^ deadlock: waits for 1B0 (rank 1, position 3), which is never reached",
        "rank 1 | 1F1 1B1 1F0 1B0",
        "         ^^^ deadlock: waits for 0F1 (rank 0, position 2), which is never reached",
    ]


def test_the_report_says_when_there_is_nothing_to_report():
    assert report(two_by_two(), []) == "sound: 2 ranks, 2 stages, 2 chunks\n"


def test_the_report_tells_faults_in_copies_from_faults_in_compute():
    plan = make_plan(["0F0 0B0"], whole(4), copies=["0L0 0O0"], offload_share=0.5)
    assert report(plan, check(plan)).splitlines()[1:] == [
        "rank 0 | 0F0 0B0",
        "copy 0 | 0L0 0O0",
        "         ^^^ runs before 0O0 (position 1), which it needs",
    ]


def test_the_report_cuts_long_rows_and_long_lists():
    many = range(60)
    plan = make_plan([" ".join([f"0F{c}" for c in many] + [f"0B{c}" for c in many])], whole(*[1] * 60))
    lines = report(plan, check(with_step(plan, "0B9", free_bytes=99))).splitlines()
    at = lines[1].index("0B9")
    assert lines[1].startswith("rank 0 | ... ")
    assert lines[1].endswith(" ...")
    assert lines[2][at - 1 : at + 3] == " ^^^"
    assert report(plan, check(replace(plan, ranks=((),)))).splitlines()[-1] == "... and 100 more"


@given(sound_plans(), st.integers(0, 2**32))
def test_the_report_shows_every_fault_of_a_broken_plan(plan, seed):
    rows = tuple(tuple(sorted(steps, key=lambda s: hash((seed, s.action.chunk, s.action.stage)))) for steps in plan.ranks)
    broken = replace(plan, ranks=rows)
    found = check(broken)[:20]
    text = report(broken, found)
    assert all(fault.reason in text for fault in found)
    assert text.count("^ ") == sum(fault.position is not None for fault in found)
