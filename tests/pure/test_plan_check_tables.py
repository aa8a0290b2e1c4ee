"""`check` catches tables of wrong shape or range, and tokens that are in no chunk or in two."""

from dataclasses import replace

import pytest

from megatron_epp.plan import NO_RECOMPUTE, Chunk, Messages, Prediction, Recompute
from megatron_epp.plan.proof import check
from tests.support.plan.small_plans import chunk, faults, hybrid, make_plan, only_fault, two_by_two, whole, with_step


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([chunk((0, 0, 3)), chunk((1, 0, 4))], "tokens 3 to 4 of sequence 0 are in no chunk"),
        ([chunk((0, 1, 4)), chunk((1, 0, 4))], "tokens 0 to 1 of sequence 0 are in no chunk"),
        ([chunk((0, 0, 2)), chunk((0, 3, 4), (1, 0, 4))], "tokens 2 to 3 of sequence 0 are in no chunk"),
        ([chunk((0, 0, 3)), chunk((0, 2, 4), (1, 0, 4))], "tokens 2 to 3 of sequence 0 are in chunk 0 and in chunk 1"),
        ([chunk((0, 0, 4), (1, 0, 4)), chunk((1, 0, 4))], "tokens 0 to 4 of sequence 1 are in chunk 0 and in chunk 1"),
        ([chunk((0, 0, 4)), chunk((1, 0, 5))], "chunk 1 holds tokens 0 to 5 of sequence 1, which has 4"),
        ([chunk((0, 0, 4)), chunk((1, 2, 2), (1, 0, 4))], "chunk 1 holds tokens 2 to 2 of sequence 1, which has 4"),
        ([chunk((0, 0, 4)), chunk((1, 0, 4), (2, 0, 1))], "chunk 1 holds sequence 2; there are 2"),
        ([chunk((0, 0, 4), (1, 0, 4)), Chunk(())], "chunk 1 is empty"),
        ([chunk((0, 0, 2), (0, 2, 4)), chunk((1, 0, 4))], "chunk 0 holds 2 slices of longer sequences; two can run"),
        ([chunk((0, 0, 2), (1, 0, 2)), chunk((0, 2, 4), (1, 2, 4))], "chunk 1 holds 2 slices"),
        ([chunk((0, 0, 2), (1, 0, 2)), chunk((0, 2, 4), (1, 2, 4))], "chunk 0 holds 2 slices"),
        ([chunk((0, 0, 2)), chunk((1, 0, 4), (0, 2, 4))], "chunk 1 has its slice at position 1; a slice comes first in"),
    ],
)
def test_every_token_is_in_exactly_one_chunk_and_slices_come_first(chunks, reason):
    plan = replace(make_plan(["0F0 0F1 0B1 0B0"], whole(4, 4)), chunks=tuple(chunks))
    assert any(reason in fault for fault in faults(plan)), faults(plan)


def test_a_sequence_may_begin_behind_the_end_of_another_one_and_last_in_its_chunk():
    rows = ["0F0 0F1 0F2 0B2 0B1 0B0"]
    table = [chunk((0, 0, 2)), chunk((0, 2, 4), (2, 0, 1), (1, 0, 2)), chunk((1, 2, 4))]
    assert not faults(make_plan(rows, table))
    assert not faults(make_plan(rows, [table[0], chunk((0, 2, 4), (1, 0, 2)), chunk((1, 2, 4), (2, 0, 1))]))
    early = only_fault(make_plan(["0F0 0F1 0F2 0B1 0B2 0B0"], table))
    assert "runs before 0B2 (position 4), which it needs: the slice in chunk 2 comes later" in early
    behind = [table[0], chunk((0, 2, 4), (1, 0, 2), (2, 0, 1)), table[2]]
    assert any("chunk 1 holds 2 slices" in fault for fault in faults(make_plan(rows, behind)))


def test_a_part_that_is_there_twice_does_not_hide_or_invent_others():
    plan = make_plan(["0F0 0F1 0B1 0B0"], whole(4, 4))
    plan = replace(plan, lengths=(4,), chunks=(chunk((0, 0, 4)), chunk((0, 1, 2))))
    assert only_fault(plan) == "tokens 1 to 2 of sequence 0 are in chunk 0 and in chunk 1"


WRONG_TABLES = [
    ({"num_layers": (4,)}, "num_layers has 1 entries for 2 stages"),
    ({"static_bytes": (0, 0, 0)}, "static_bytes has 3 entries for 2 ranks"),
    ({"cap_bytes": (0,)}, "cap_bytes has 1 entries for 2 ranks"),
    ({"predicted": Prediction.none(3)}, "predicted.peak_bytes has 3 entries for 2 ranks"),
    ({"copies": ((),)}, "copies has 1 entries for 2 ranks"),
    ({"host_links": (0, 0, 1)}, "host_links has 3 entries for 2 ranks"),
    ({"host_links": (0, 2)}, "host_links puts rank 1 on link 2; links of 2 ranks are 0 to 1"),
    ({"host_links": (-1, 0)}, "host_links puts rank 0 on link -1"),
    ({"recompute": ((NO_RECOMPUTE,) * 2,)}, "recompute has 1 rows of [2] entries; expected 2 rows of 2"),
    ({"offload_share": ((0.0, 0.0), (0.0,))}, "offload_share has 2 rows of [1, 2] entries; expected 2 rows of 2"),
    ({"messages": Messages((), ((0.0, 0.0),))}, "messages.activation_us has 0 rows of [] entries; expected 1 rows of 2"),
    ({"messages": Messages(((0.0, 0.0),), ((0.0, -1.0),))}, "messages.gradient_us of stage 0, chunk 1 is -1.0 us"),
    ({"placement": (0, 2)}, "placement puts stage 1 on rank 2; there are 2 ranks"),
    ({"placement": ()}, "placement is empty"),
    ({"lengths": ()}, "lengths is empty: a plan needs at least one sequence"),
    ({"chunks": ()}, "chunks is empty: a plan needs at least one chunk"),
    ({"num_layers": (4, -1)}, "num_layers of stage 1 is -1; it is at least 0"),
    ({"static_bytes": (-5, 0)}, "static_bytes of rank 0 is -5"),
    ({"cap_bytes": (9, -1)}, "cap_bytes of rank 1 is -1"),
    ({"host_cap_bytes": (9, -1)}, "host_cap_bytes of rank 1 is -1"),
    (
        {"recompute_us": ((0.0, 20.1), (0.0, 0.0))},
        "stage 0 recomputes chunk 1 in 20.1 us, a part of an action that takes 20.0 us",
    ),
    ({"recompute_us": ((1e12, 0.0), (0.0, 0.0))}, "stage 0 recomputes chunk 0 in 1000000000000.0 us"),
    ({"lengths": (2, 0)}, "sequence 1 has 0 tokens"),
    ({"token_multiple": 0}, "token_multiple is 0"),
    (
        {"recompute": ((NO_RECOMPUTE,) * 2, (NO_RECOMPUTE, Recompute(2, 2, 1)))},
        "stage 1 recomputes 2 full + 2 selective + 1 mlp layers of chunk 1; it has 4",
    ),
    (
        {"recompute": ((Recompute(-1), NO_RECOMPUTE), (NO_RECOMPUTE,) * 2)},
        "stage 0 recomputes -1 full layers of chunk 0; it has 4",
    ),
    ({"offload_share": ((0.0, 1.5), (0.0, 0.0))}, "stage 0 offloads a share of 1.5 of chunk 1"),
    ({"offload_share": ((0.0, 0.0), (float("nan"), 0.0))}, "stage 1 offloads a share of nan of chunk 0"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG_TABLES, ids=[reason[:30] for _, reason in WRONG_TABLES])
def test_tables_have_the_right_shapes_and_ranges(change, reason):
    assert any(reason in fault for fault in faults(replace(two_by_two(), **change)))


def test_step_costs_are_not_negative():
    assert only_fault(with_step(two_by_two(), "1B0", time_us=-1.0)) == "rank 1 position 1 1B0: takes -1.0 us"
    assert "1B0: takes nan us" in only_fault(with_step(two_by_two(), "1B0", time_us=float("nan")))
    assert "allocates -1 and frees 0 bytes" in only_fault(with_step(two_by_two(), "0F0", alloc_bytes=-1))


def test_recompute_takes_up_to_all_of_a_backward_and_may_take_no_time():
    layers = ((Recompute(1), Recompute(1)), (NO_RECOMPUTE,) * 2)
    for times_us in ((20.0, 0.0), (0.0, 0.0)):
        assert check(replace(two_by_two(), recompute=layers, recompute_us=(times_us, (0.0, 0.0)))) == []


def test_recompute_ahead_of_its_backward_is_held_against_the_action_that_runs_it():
    plan = make_plan(["0F0 0R0 0B0"], whole(4))
    assert check(replace(plan, recompute=((Recompute(1),),), recompute_us=((10.0,),))) == []
    late = replace(plan, recompute=((Recompute(1),),), recompute_us=((15.0,),))
    assert only_fault(late) == "stage 0 recomputes chunk 0 in 15.0 us, a part of an action that takes 10.0 us"


def test_only_the_last_slice_of_a_sequence_ends_off_the_multiple():
    """Its slices end at 6, 9 and 11."""
    assert check(replace(hybrid(), token_multiple=3)) == []
    reason = "which is no multiple of 2 (token_multiple); only the last slice of a sequence may"
    assert only_fault(replace(hybrid(), token_multiple=2)) == f"chunk 1 ends a slice of sequence 0 at token 9, {reason}"
