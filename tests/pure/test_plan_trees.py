"""Plans whose sequences share prefixes: what they must say, what waits for what, and what `check` finds wrong with them."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Chunk, PlanError, Segment
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of, slice_neighbours
from megatron_epp.plan.proof import check
from megatron_epp.plan.relations import deps
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from tests.support.plan import second_simulator
from tests.support.plan.random_forests import forest, forest_plan
from tests.support.plan.report_plans import predicted
from tests.support.plan.small_plans import chunk, make_plan

NONE = NOTHING_BORROWED
LENGTHS = (8, 9, 7)
BORROWED = (NONE, Borrowed(0, 4), Borrowed(1, 6))
"""Sequence 1 begins with four tokens of 0, and 2 with six of sequence 1, of which 0 holds four."""
CHUNKS = (chunk((0, 0, 6)), chunk((0, 6, 8), (1, 4, 7)), chunk((1, 7, 9)), chunk((2, 6, 7)))
ROW = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0"


def tree(row=ROW, chunks=CHUNKS, borrowed=BORROWED, lengths=LENGTHS):
    plan = replace(make_plan([row], CHUNKS, static_bytes=0), chunks=chunks, lengths=lengths, borrowed=borrowed)
    steps = tuple(step._replace(alloc_bytes=0, free_bytes=0) for step in plan.ranks[0])
    return replace(plan, ranks=(steps,))


def test_a_prefix_is_where_the_sequences_that_hold_it_have_it():
    assert path_of(2, 7, BORROWED) == [Segment(0, 0, 4), Segment(1, 4, 6), Segment(2, 6, 7)]
    assert path_of(2, 5, BORROWED) == [Segment(0, 0, 4), Segment(1, 4, 5)]
    assert path_of(1, 3, BORROWED) == [Segment(0, 0, 3)]
    assert path_of(0, 3, ()) == [Segment(0, 0, 3)]


def test_segments_wait_for_the_chunk_with_the_token_before_theirs_and_it_may_have_several_that_wait():
    links = slice_neighbours(CHUNKS, BORROWED)
    assert (links.previous, links.following) == (((), (0,), (1,), (1,)), ((1,), (2, 3), (), ()))
    needs = deps(CHUNKS, 1, borrowed=BORROWED)
    plan = tree()
    assert [str(need) for need in needs(plan.ranks[0][3].action)] == ["0F1"]
    assert [str(need) for need in needs(plan.ranks[0][6].action)] == ["0F1", "0B2", "0B3"]


def test_a_sound_tree_has_no_violations_and_a_file_of_its_own_version():
    plan = tree()
    assert check(plan) == []
    text = to_json(plan)
    assert (json.loads(text)["version"], json.loads(text)["borrowed"]) == (4, [[-1, 0], [0, 4], [1, 6]])
    assert from_json(text) == plan
    assert json.loads(to_json(make_plan(["0F0 0B0"], CHUNKS[:1])))["version"] == 3


FAULTS = [
    (tree(borrowed=BORROWED[:2]), "borrowed has 2 entries for 3 sequences"),
    (tree(borrowed=(NONE, Borrowed(3, 4), NONE)), "sequence 1 borrows from sequence 3; there are 3"),
    (tree(borrowed=(NONE, Borrowed(1, 4), NONE)), "sequence 1 borrows from sequence 1; there are 3"),
    (tree(borrowed=(NONE, Borrowed(0, 9), NONE)), "borrows 9 tokens of sequence 0, which holds those from 0 to 8 itself"),
    (tree(borrowed=(NONE, Borrowed(0, 4), Borrowed(1, 4))), "borrows 4 tokens of sequence 1, which holds those from 4 to 9"),
    (tree(borrowed=(NONE, Borrowed(0, 0), NONE)), "sequence 1 borrows 0 tokens of sequence 0"),
    (tree(lengths=(8, 9, 6)), "sequence 2 borrows 6 of its 6 tokens; one at least is its own"),
    (tree(borrowed=(Borrowed(1, 3), Borrowed(0, 4), NONE)), "borrows 3 tokens of sequence 1, which holds those from 4"),
    (tree(borrowed=(Borrowed(2, 5), Borrowed(0, 6), Borrowed(1, 6))), "5 tokens of sequence 2, which holds those from 6"),
    (tree(chunks=(*CHUNKS[:3], chunk((2, 5, 7)))), "tokens 5 to 7 of sequence 2, which has 7, 6 of them in sequence 1"),
    (tree(chunks=(CHUNKS[0], chunk((0, 6, 8), (1, 5, 7)), *CHUNKS[2:])), "tokens 4 to 5 of sequence 1 are in no chunk"),
    (tree(chunks=(CHUNKS[0], chunk((0, 6, 8), (1, 4, 8)), *CHUNKS[2:])), "tokens 7 to 8 of sequence 1 are in chunk 1 and"),
    (
        tree(chunks=(CHUNKS[0], chunk((0, 6, 8)), chunk((2, 6, 7), (1, 4, 9)), chunk((2, 7, 8))), lengths=(8, 9, 8)),
        "chunk 2 holds tokens of sequence 2 from 6 on ahead of the one before them",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "reason"), FAULTS, ids=[reason for _, reason in FAULTS])
def test_what_is_no_tree_is_found(plan, reason):
    assert reason in "; ".join(map(str, check(plan)))


@pytest.mark.parametrize(
    "row",
    [
        "0F0 0F2 0F1 0F3 0B3 0B2 0B1 0B0",  # a slice ahead of the one before it
        "0F0 0F3 0F1 0F2 0B3 0B2 0B1 0B0",  # a borrower ahead of the sequence that it borrows from
        "0F0 0F1 0F2 0F3 0B2 0B1 0B3 0B0",  # the gradient of a lender ahead of a borrower's
        "0F0 0F1 0F2 0F3 0B3 0B1 0B2 0B0",
    ],
)
def test_an_action_ahead_of_one_that_it_waits_for_is_found(row):
    assert check(tree(row))


def test_keys_that_are_freed_ahead_of_a_borrower_s_backward_are_found():
    plan = tree()
    steps = list(plan.ranks[0])
    steps[0] = steps[0]._replace(alloc_bytes=10)
    steps[5] = steps[5]._replace(free_bytes=10)  # 0B2; 0B1 and 0B0 still read them
    said = "; ".join(map(str, check(replace(plan, ranks=(tuple(steps),)))))
    assert "0B1 reads what 0F1 kept" in said or "freed before" in said


@given(st.integers(0, 10**6))
def test_random_forests_are_sound_and_two_simulators_say_the_same_of_them(seed):
    plan = predicted(forest_plan(random.Random(seed), forest(random.Random(seed))))
    assert check(plan) == []
    assert second_simulator.faults(plan) == []
    start, took = second_simulator.times(plan)
    assert simulate(plan).makespan_us == pytest.approx(max(start[key] + took[key] for key in start))


@given(st.integers(0, 10**6))
def test_two_actions_in_the_wrong_order_are_found(seed):
    rng = random.Random(seed)
    plan = forest_plan(rng, forest(rng))
    steps = {tuple(step.action): step for step in plan.ranks[0]}
    first, then, _ = rng.choice([edge for edge in second_simulator.waited_for(plan) if {*edge[:2]} <= {*steps}])
    row = [step for step in plan.ranks[0] if tuple(step.action) not in (first, then)]
    row += [steps[then], steps[first]]
    assert check(replace(plan, ranks=(tuple(row),)))


@pytest.mark.parametrize("version", [2, 5])
def test_a_file_of_another_version_is_refused(version):
    document = json.loads(to_json(tree())) | {"version": version}
    with pytest.raises(PlanError, match=f"plan version {version} cannot be read, only 3 and 4"):
        from_json(json.dumps(document))


def test_a_chunk_table_without_shared_prefixes_has_the_rules_it_had():
    plan = tree(chunks=(chunk((0, 0, 8)), chunk((1, 0, 4), (1, 4, 9)), chunk((2, 0, 7)), Chunk(())), borrowed=())
    assert "chunk 3 is empty" in "; ".join(map(str, check(plan)))
