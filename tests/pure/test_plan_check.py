"""`check` passes what is sound and catches actions that are missing, misplaced or in an impossible order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, Op, PlanError, check, simulate
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import (
    EXAMPLES,
    evaluation,
    faults,
    make_plan,
    offload,
    only_fault,
    sliced,
    two_by_two,
    whole,
    with_rows,
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_sound(name):
    assert check(EXAMPLES[name]()) == []


@given(sound_plans())
def test_every_plan_that_runs_in_order_is_sound(plan):
    assert check(plan) == []


# Presence


def test_a_missing_action():
    plan = with_rows(two_by_two(), "0F0 0F1 0B0", "1F0 1B0 1F1 1B1")
    assert only_fault(plan) == "rank 0 0B1: missing: stage 0 never runs B of chunk 1"


def test_a_doubled_action():
    plan = with_rows(two_by_two(), "0F0 0F1 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    assert only_fault(plan) == "rank 0 position 3 0F1: doubled: already at rank 0 position 1"


def test_an_action_on_the_wrong_rank():
    plan = with_rows(two_by_two(), "0F0 0F1 0B0 0B1 1B1", "1F0 1B0 1F1")
    assert only_fault(plan) == "rank 0 position 4 1B1: wrong rank: stage 1 is placed on rank 1"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("2F0", "unknown stage 2; there are 2"),
        ("1F2", "unknown chunk 2; there are 2"),
        ("1O0", "O belongs into the copies"),
        ("1SEND_B0", "lowering adds them"),
    ],
)
def test_a_foreign_action(extra, reason):
    plan = with_rows(two_by_two(), "0F0 0F1 0B0 0B1", f"1F0 1B0 1F1 1B1 {extra}")
    assert reason in only_fault(plan)


def test_a_forward_only_plan_holds_nothing_but_forwards():
    plan = with_rows(evaluation(), "0F0 0F1 0F2", "1F0 1F1 1F2 1B2")
    only = "a forward-only plan holds forwards, and vocabulary shards with their losses, and nothing else"
    assert only_fault(plan) == f"rank 1 position 3 1B2: {only}"
    assert len(faults(replace(evaluation(), forward_only=False))) == 6


# Order


def test_two_ranks_that_wait_for_each_other():
    plan = with_rows(two_by_two(), "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    found = faults(plan)
    assert found[0] == "rank 0 position 1 0B0: deadlock: waits for 1B0 (rank 1, position 3), which is never reached"
    assert found[1] == "rank 1 position 0 1F1: deadlock: waits for 0F1 (rank 0, position 2), which is never reached"


def test_two_ranks_of_a_looped_placement_that_wait_for_each_other():
    """Each list is in a possible order by itself and no message crosses another."""
    rows = ["0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]
    plan = make_plan(rows, whole(1, 1), placement=(0, 1, 0, 1))
    assert check(plan) == []
    plan = with_rows(plan, "0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1", rows[1])
    assert faults(plan) == [
        "rank 0 position 2 2B0: deadlock: waits for 3B0 (rank 1, position 3), which is never reached",
        "rank 1 position 1 1F1: deadlock: waits for 0F1 (rank 0, position 3), which is never reached",
    ]


def test_copies_and_compute_that_wait_for_each_other():
    plan = make_plan(["0F0 0B0 0F1 0B1"], whole(2, 2), copies=["0O0 0O1 0L0 0L1"], offload_share=0.5)
    assert faults(plan) == [
        "rank 0 position 1 0B0: deadlock: waits for 0L0 (rank 0, position 2), which is never reached",
        "rank 0 copy position 1 0O1: deadlock: waits for 0F1 (rank 0, position 2), which is never reached",
    ]


def test_crossed_sends_on_one_link():
    plan = with_rows(two_by_two(), "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    simulate(plan)  # it would even run: both messages are there when rank 1 wants the second
    assert only_fault(plan) == (
        "rank 1 position 0 1F1: crossed: takes chunk 1 while rank 0 sends chunk 0 first (position 0) "
        "on the link from rank 0 to rank 1"
    )


def test_crossed_gradients_on_one_link():
    plan = with_rows(two_by_two(), "0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1")
    assert only_fault(plan) == (
        "rank 0 position 2 0B1: crossed: takes chunk 1 while rank 1 sends chunk 0 first (position 1) "
        "on the link from rank 1 to rank 0"
    )


def test_boundaries_that_share_a_link_may_interleave():
    """Rank 0 sends 0F0, 0F1, 2F0; rank 1 takes 2F0 before 0F1. Within each boundary the order is one."""
    plan = make_plan(["0F0 0F1 2F0 2F1", "1F0 3F0 1F1 3F1"], whole(1, 1), placement=(0, 1, 0, 1), forward_only=True)
    assert check(plan) == []


def test_stages_on_one_rank_cannot_cross():
    plan = make_plan(["0F0 0F1 1F1 1F0"], whole(2, 2), placement=(0, 0), forward_only=True)
    assert check(plan) == []


def test_a_forward_before_the_slice_it_attends_to():
    plan = with_rows(sliced(), "0F1 0F0 0F2 0B1 0B0 0B2", "1F0 1F1 1B1 1F2 1B0 1B2")
    assert faults(plan)[0] == (
        "rank 0 position 0 0F1: runs before 0F0 (position 1), which it needs: chunk 1 attends to the slice in chunk 0"
    )


def test_a_slice_backward_before_that_of_a_later_slice():
    plan = with_rows(sliced(), "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2")
    found = faults(plan)
    assert found == [
        "rank 0 position 3 0B0: runs before 0B1 (position 4), which it needs: "
        "the slice in chunk 1 comes later and adds to the gradient of keys and values of chunk 0",
        "rank 1 position 2 1B0: runs before 1B1 (position 4), which it needs: "
        "the slice in chunk 1 comes later and adds to the gradient of keys and values of chunk 0",
    ]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("0B0 0F0 0W0", "0B0: runs before 0F0 (position 1)"),
        ("0F0 0W0 0B0", "0W0: runs before 0B0 (position 2)"),
        ("0F0 0B0 0R0", "0B0: runs before 0R0 (position 2)"),
    ],
)
def test_an_action_before_what_it_uses(row, fault):
    assert fault in only_fault(make_plan([row], whole(4)))


def test_a_load_before_its_offload():
    plan = make_plan(["0F0 0B0"], whole(4), copies=["0L0 0O0"], offload_share=0.5)
    assert only_fault(plan) == "rank 0 copy position 0 0L0: runs before 0O0 (position 1), which it needs"


def test_an_offload_needs_its_load_and_its_share():
    alone = replace(offload(), copies=(offload().copies[0][:1], ()))
    assert only_fault(alone) == "rank 0 0L0: missing: the offload share of chunk 0 is 0.5"
    assert [str(fault.action) for fault in check(replace(offload(), copies=()))] == ["0O0", "0L0"]
    assert faults(replace(offload(), offload_share=((0.0,) * 3,) * 2)) == [
        "rank 0 copy position 0 0O0: the offload share of chunk 0 at stage 0 is 0",
        "rank 0 copy position 1 0L0: the offload share of chunk 0 at stage 0 is 0",
    ]


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
