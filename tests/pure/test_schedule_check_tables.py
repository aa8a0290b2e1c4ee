"""`check` catches tables of wrong shape or range, and tokens that are in no chunk or in two."""

from dataclasses import replace

import pytest
from schedule_plans import chunk, faults, hybrid, make_plan, only_fault, two_by_two, whole, with_step

from megatron_epp.schedule import NO_RECOMPUTE, Chunk, Messages, Prediction, Recompute, check


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
        ([chunk((0, 0, 2), (0, 2, 4)), chunk((1, 0, 4))], "chunk 0 holds 2 slices of longer sequences; at most one can run"),
        ([chunk((0, 0, 2), (1, 0, 2)), chunk((0, 2, 4), (1, 2, 4))], "chunk 1 holds 2 slices"),
        ([chunk((0, 0, 2)), chunk((1, 0, 4), (0, 2, 4))], "chunk 1 has its slice at place 1; a slice comes first in its chunk"),
    ],
)
def test_every_token_is_in_exactly_one_chunk_and_slices_come_first(chunks, reason):
    plan = replace(make_plan(["0F0 0F1 0B1 0B0"], whole(4, 4)), chunks=tuple(chunks))
    assert any(reason in fault for fault in faults(plan)), faults(plan)


def test_a_part_that_is_there_twice_does_not_hide_or_invent_others():
    plan = make_plan(["0F0 0F1 0B1 0B0"], whole(4, 4))
    plan = replace(plan, lengths=(4,), chunks=(chunk((0, 0, 4)), chunk((0, 1, 2))))
    assert only_fault(plan) == "tokens 1 to 2 of sequence 0 are in chunk 0 and in chunk 1"


def test_a_slice_in_the_middle_of_its_sequence_may_have_company():
    assert [c.kind(hybrid().lengths) for c in hybrid().chunks] == ["split", "hybrid", "hybrid"]
    assert check(hybrid()) == []


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
    ({"lengths": (2, 0)}, "sequence 1 has 0 tokens"),
    ({"token_multiple": 0}, "token_multiple is 0"),
    (
        {"recompute": ((NO_RECOMPUTE,) * 2, (NO_RECOMPUTE, Recompute(2, 2, 1)))},
        "stage 1 recomputes 2 whole + 2 linear + 1 mlp layers of chunk 1; it has 4",
    ),
    (
        {"recompute": ((Recompute(-1), NO_RECOMPUTE), (NO_RECOMPUTE,) * 2)},
        "stage 0 recomputes -1 whole layers of chunk 0; it has 4",
    ),
    ({"offload_share": ((0.0, 1.5), (0.0, 0.0))}, "stage 0 offloads a share of 1.5 of chunk 1"),
    ({"offload_share": ((0.0, float("nan")), (0.0, 0.0))}, "stage 0 offloads a share of nan of chunk 1"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG_TABLES, ids=[reason[:30] for _, reason in WRONG_TABLES])
def test_tables_have_the_right_shapes_and_ranges(change, reason):
    assert any(reason in fault for fault in faults(replace(two_by_two(), **change)))


def test_step_costs_are_not_negative():
    assert only_fault(with_step(two_by_two(), "1B0", time_us=-1.0)) == "rank 1 position 1 1B0: takes -1.0 us"
    assert "1B0: takes nan us" in only_fault(with_step(two_by_two(), "1B0", time_us=float("nan")))
    assert "allocates -1 and frees 0 bytes" in only_fault(with_step(two_by_two(), "0F0", alloc_bytes=-1))
