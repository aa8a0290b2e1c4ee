"""`check` passes what is sound, and finds what is missing, misplaced, out of order, of wrong shape, or wrong in figures."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import NO_RECOMPUTE, Action, Chunk, Messages, Op, PlanError, Prediction, Recompute
from megatron_epp.plan.proof import check
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.report_plans import predicted
from tests.support.plan.small_plans import (
    EXAMPLES,
    chunk,
    evaluation,
    faults,
    hybrid,
    make_plan,
    offload,
    one_f_one_b,
    only_fault,
    sliced,
    two_by_two,
    whole,
    with_rows,
    with_step,
)


@given(sound_plans())
def test_every_plan_that_runs_in_order_is_sound_whether_it_predicts_nothing_or_what_the_simulator_says(plan):
    assert (check(plan), check(from_json(to_json(predicted(plan))))) == ([], [])


LOOPED_ROWS = ["0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]
LOOPED = make_plan(LOOPED_ROWS, whole(1, 1), placement=(0, 1, 0, 1))
SPLIT = make_plan(["0F0 0B0 0W0"], whole(4))
LATER = "the slice in chunk 1 comes later and adds to the gradient of keys and values of chunk 0"


@pytest.mark.parametrize(
    "plan",
    [
        *(make() for make in EXAMPLES.values()),
        LOOPED,
        SPLIT,
        # rank 0 sends 0F0, 0F1, 2F0; rank 1 takes 2F0 before 0F1: within each boundary the order is one
        make_plan(["0F0 0F1 2F0 2F1", "1F0 3F0 1F1 3F1"], whole(1, 1), placement=(0, 1, 0, 1), forward_only=True),
        make_plan(["0F0 0F1 1F1 1F0"], whole(2, 2), placement=(0, 0), forward_only=True),  # of one rank none can cross
        with_step(with_step(sliced(), "0B1", free_bytes=30 + 40), "0B0", free_bytes=50 + 40),  # moved within the sequence
    ],
    ids=[*EXAMPLES, "looped", "split", "a shared link", "stages of one rank", "bytes moved within a sequence"],
)
def test_what_is_sound_has_no_violations(plan):
    assert check(plan) == []


ROW = "0F0 0F1 0B0 0B1"
ORDERS = [
    # presence
    (two_by_two(), ["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"], ["rank 0 0B1: missing: stage 0 never runs B of chunk 1"]),
    (two_by_two(), ["0F0 0F1 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], ["position 3 0F1: doubled: already at rank 0 position 1"]),
    (two_by_two(), [f"{ROW} 1B1", "1F0 1B0 1F1"], ["rank 0 position 4 1B1: wrong rank: stage 1 is placed on rank 1"]),
    *(
        (two_by_two(), [ROW, f"1F0 1B0 1F1 1B1 {extra}"], [reason])
        for extra, reason in (
            ("2F0", "unknown stage 2; there are 2"),
            ("1F2", "unknown chunk 2; there are 2"),
            ("1O0", "O belongs into the copies"),
            ("1SEND_B0", "lowering adds them"),
        )
    ),
    (
        evaluation(),
        ["0F0 0F1 0F2", "1F0 1F1 1F2 1B2"],
        ["rank 1 position 3 1B2: a forward-only plan holds forwards, and vocabulary shards with their losses"],
    ),
    # order
    (
        two_by_two(),
        ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
        [
            "rank 0 position 1 0B0: deadlock: waits for 1B0 (rank 1, position 3), which is never reached",
            "rank 1 position 0 1F1: deadlock: waits for 0F1 (rank 0, position 2), which is never reached",
            ...,
        ],
    ),
    (
        LOOPED,  # each list is in a possible order by itself and no message crosses another
        ["0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1", LOOPED_ROWS[1]],
        [
            "rank 0 position 2 2B0: deadlock: waits for 3B0 (rank 1, position 3), which is never reached",
            "rank 1 position 1 1F1: deadlock: waits for 0F1 (rank 0, position 3), which is never reached",
        ],
    ),
    (
        two_by_two(),
        ["0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"],
        ["rank 1 position 0 1F1: crossed: takes chunk 1 while rank 0 sends chunk 0 first (position 0) on the link from rank 0"],
    ),
    (
        two_by_two(),
        ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"],
        ["rank 0 position 2 0B1: crossed: takes chunk 1 while rank 1 sends chunk 0 first (position 1) on the link from rank 1"],
    ),
    (
        sliced(),
        ["0F1 0F0 0F2 0B1 0B0 0B2", "1F0 1F1 1B1 1F2 1B0 1B2"],
        [
            "position 0 0F1: runs before 0F0 (position 1), which it needs: chunk 1 attends to the slice in chunk 0",
            "crossed: takes chunk 0",
        ],
    ),
    (
        sliced(),
        ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2"],
        [
            f"rank 0 position 3 0B0: runs before 0B1 (position 4), which it needs: {LATER}",
            f"rank 1 position 2 1B0: runs before 1B1 (position 4), which it needs: {LATER}",
        ],
    ),
    *(
        (make_plan([row], whole(4)), [row], [fault])
        for row, fault in (
            ("0B0 0F0 0W0", "0B0: runs before 0F0 (position 1)"),
            ("0F0 0W0 0B0", "0W0: runs before 0B0 (position 2)"),
            ("0F0 0B0 0R0", "0B0: runs before 0R0 (position 2)"),
        )
    ),
]


COPIES = {"copies": ["0O0 0L0"], "offload_share": 0.5}
CHANGED = [
    *((with_rows(plan, *rows), expected) for plan, rows, expected in ORDERS),
    # copies
    (
        make_plan(["0F0 0B0 0F1 0B1"], whole(2, 2), copies=["0O0 0O1 0L0 0L1"], offload_share=0.5),
        [
            "rank 0 position 1 0B0: deadlock: waits for 0L0 (rank 0, position 2), which is never reached",
            "rank 0 copy position 1 0O1: deadlock: waits for 0F1 (rank 0, position 2), which is never reached",
        ],
    ),
    (
        make_plan(["0F0 0B0"], whole(4), copies=["0L0 0O0"], offload_share=0.5),
        ["rank 0 copy position 0 0L0: runs before 0O0 (position 1), which it needs"],
    ),
    (replace(offload(), copies=(offload().copies[0][:1], ())), ["rank 0 0L0: missing: the offload share of chunk 0 is 0.5"]),
    (replace(offload(), copies=()), ["rank 0 0O0: missing", "rank 0 0L0: missing"]),
    (
        replace(offload(), offload_share=((0.0,) * 3,) * 2),
        [
            "rank 0 copy position 0 0O0: the offload share of chunk 0 at stage 0 is 0",
            "rank 0 copy position 1 0L0: the offload share of chunk 0 at stage 0 is 0",
        ],
    ),
    (with_step(offload(), "0O0", alloc_bytes=3), ["rank 0 copy position 0 0O0: an offload allocates 3 bytes", ...]),
    (with_step(offload(), "0L0", free_bytes=3), ["rank 0 copy position 1 0L0: a load frees 3 bytes", ...]),
    # caps
    (
        replace(one_f_one_b(), cap_bytes=(170, 139)),
        [
            "rank 0 position 1 0F1: 180 bytes live at 10.0 us, 10 above the cap of 170 (the rank's peak is 180)",
            "rank 1 position 0 1F0: 140 bytes live at 11.0 us, 1 above the cap of 139 (the rank's peak is 140)",
        ],
    ),
    (replace(one_f_one_b(), cap_bytes=(99, 1000)), ["rank 0: static bytes 100 are above the cap of 99"]),
    # bytes that are never freed, freed twice, early, or read behind their end
    (
        with_step(two_by_two(), "1B0", free_bytes=15),
        ["rank 1: 5 bytes of stage 1, chunk 0 (and later slices of its sequence) are never freed"],
    ),
    (
        with_step(two_by_two(), "0B0", free_bytes=25),
        ["rank 0 position 2 0B0: frees 25 bytes when only 20 of its stage and chunk are live"],
    ),
    (
        with_step(sliced(), "0F1", free_bytes=200),
        ["rank 0 position 1 0F1: frees 200 bytes when only 120 of its stage and chunk are live", ...],
    ),
    (
        with_step(with_step(offload(), "0O0", free_bytes=40), "0L0", alloc_bytes=0),
        ["loads 0 bytes; its offload moved 40", "0B0: reads what 0F0 kept, but all of it was freed before", ...],
    ),
    (
        with_step(with_step(SPLIT, "0B0", free_bytes=40), "0W0", free_bytes=0),
        ["rank 0 position 2 0W0: reads what 0F0 kept, but all of it was freed before"],
    ),
]


@pytest.mark.parametrize(("plan", "expected"), CHANGED, ids=[expected[0] for _, expected in CHANGED])
def test_what_is_wrong_with_order_copies_caps_or_bytes_is_found_where_it_is(plan, expected):
    """Three dots stand for whatever follows from it."""
    found, known = faults(plan), [text for text in expected if text is not ...]
    assert [text for text, fault in zip(known, found, strict=... not in expected) if text not in fault] == [], found


def test_a_plan_with_backwards_that_is_called_an_evaluation_lacks_each_of_them():
    assert len(faults(replace(evaluation(), forward_only=False))) == 6


def test_a_crossing_is_found_though_the_plan_would_run():
    simulate(with_rows(two_by_two(), "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"))  # both messages are there when the second is wanted


SOUND = predicted(offload())
SAID = SOUND.predicted


def saying(**changes):
    return replace(SOUND, predicted=replace(SAID, **changes))


WRONG_PREDICTIONS = [
    *(
        ({name: right * share}, f"predicted.{name} is {right * share}; the simulator finds {right}")
        for name, right in (("makespan_us", SAID.makespan_us), ("bubble_fraction", SAID.bubble_fraction))
        for share in (0.0, 0.5, 1.001, math.inf, math.nan)
    ),
    *(
        (
            {"lower_bound_us": bound_us},
            f"predicted.lower_bound_us is {bound_us}; it is within 0 and the makespan of {SAID.makespan_us}",
        )
        for bound_us in (-SAID.makespan_us, 1.001 * SAID.makespan_us, math.nan)
    ),
    *(
        (
            {"peak_bytes": tuple(peak + off_bytes * (r == rank) for r, peak in enumerate(SAID.peak_bytes))},
            f"rank {rank}: predicted.peak_bytes is {right + off_bytes}; the simulator finds {right}",
        )
        for rank, right in enumerate(SAID.peak_bytes)
        for off_bytes in (-1, 1)
    ),
]


@pytest.mark.parametrize(("changes", "fault"), WRONG_PREDICTIONS, ids=[fault for _, fault in WRONG_PREDICTIONS])
def test_what_a_plan_predicts_is_held_against_its_simulation(changes, fault):
    assert faults(saying(**changes)) == [fault]


@pytest.mark.parametrize(
    "changes",
    [
        {"makespan_us": math.nextafter(SAID.makespan_us, 0.0), "bubble_fraction": SAID.bubble_fraction + 1e-15},
        *({"lower_bound_us": share * SAID.makespan_us} for share in (0.0, 0.5, 1.0)),
    ],
    ids=["sums in another order", "no bound", "a low bound", "a tight bound"],
)
def test_a_prediction_that_rounds_otherwise_or_has_any_bound_up_to_the_makespan_is_sound(changes):
    assert check(saying(**changes)) == []


@given(sound_plans())
def test_the_peak_is_the_least_cap_that_passes(plan):
    peak = simulate(plan).peak_bytes
    assert check(replace(plan, cap_bytes=peak)) == []
    for rank, most in enumerate(peak):
        found = check(replace(plan, cap_bytes=tuple(most - (r == rank) for r, most in enumerate(peak))))
        assert [(fault.rank, "above the cap" in fault.reason) for fault in found] == [(rank, True)]


@given(sound_plans(), st.data())
def test_swapping_two_actions_of_which_one_needs_the_other_is_found(plan, data):
    rank = data.draw(st.sampled_from([r for r, steps in enumerate(plan.ranks) if steps] or [0]))
    steps = list(plan.ranks[rank])
    pairs = [(i, j) for i, a in enumerate(steps) for j, b in enumerate(steps) if i < j and is_pair(a.action, b.action)]
    if not pairs:
        return
    i, j = data.draw(st.sampled_from(pairs))
    steps[i], steps[j] = steps[j], steps[i]
    swapped = replace(plan, ranks=(*plan.ranks[:rank], tuple(steps), *plan.ranks[rank + 1 :]))
    assert any(fault.rank == rank and fault.position == i for fault in check(swapped))


def is_pair(a: Action, b: Action) -> bool:
    return (a.stage, a.chunk) == (b.stage, b.chunk) and (a.op, b.op) in ((Op.F, Op.B), (Op.B, Op.W))


@given(sound_plans(), st.data())
def test_a_dropped_or_doubled_action_is_found(plan, data):
    rank = data.draw(st.sampled_from([r for r, steps in enumerate(plan.ranks) if steps]))
    steps = plan.ranks[rank]
    i = data.draw(st.integers(0, len(steps) - 1))

    def with_steps(new):
        return replace(plan, ranks=(*plan.ranks[:rank], new, *plan.ranks[rank + 1 :]))

    for copies in plan.copies:
        for copy in copies:
            if copy.after == steps[i].action:
                assert any("is issued after" in fault.reason for fault in check(with_steps(steps[:i] + steps[i + 1 :])))
                return
    dropped = check(with_steps(steps[:i] + steps[i + 1 :]))
    if steps[i].action.op is Op.W:
        assert any("never freed" in fault.reason for fault in dropped)  # a plan may do without the W, but not lose its bytes
    else:
        assert [(fault.action, "missing" in fault.reason) for fault in dropped] == [(steps[i].action, True)]
    doubled = check(with_steps((*steps, steps[i])))
    assert [(fault.position, "doubled" in fault.reason) for fault in doubled] == [(len(steps), True)]


@given(sound_plans(), st.randoms(use_true_random=False))
def test_a_shuffled_plan_runs_or_is_refused(plan, rng):
    """Whatever `check` passes simulates; whatever does not simulate, `check` refuses."""
    ranks = []
    for steps in plan.ranks:
        steps = list(steps)
        for _ in range(rng.randint(0, 2)):
            if len(steps) > 1:
                i = rng.randrange(len(steps) - 1)
                steps[i], steps[i + 1] = steps[i + 1], steps[i]
        ranks.append(tuple(steps))
    shuffled = replace(plan, ranks=tuple(ranks))
    try:
        simulate(shuffled)
    except PlanError:
        assert check(shuffled)
    else:
        assert all("crossed" in fault.reason for fault in check(shuffled))


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
