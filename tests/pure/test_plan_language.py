"""Actions, chunks and the dependency rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, Op, PlanError, Segment, deps
from megatron_epp.plan.chunk import slice_neighbours
from tests.support.plan.small_plans import chunk

SLICED = (chunk((0, 0, 5)), chunk((0, 5, 8), (1, 0, 2)), chunk((2, 0, 4)))


def needed_by(text, chunks=SLICED, num_stages=3, optional=()):
    needs = deps(chunks, num_stages, [Action.parse(word) for word in optional])
    return {str(action) for action in needs(Action.parse(text))}


@given(st.sampled_from(Op.known()), st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_action_prints_and_parses_back(op, stage, number):
    action = Action(op, stage, number)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X5", "2f5", "-1F0", "2F5 ", "2SEND5", "2.0F1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def test_chunks_are_batched_split_or_hybrid():
    lengths = (8, 2, 4)
    assert [c.kind(lengths) for c in SLICED] == ["split", "hybrid", "batched"]
    assert SLICED[1].slice_of(lengths) == Segment(0, 5, 8)
    assert SLICED[2].slice_of(lengths) is None
    assert SLICED[1].num_tokens == 5
    assert SLICED[1].padded_tokens(4) == 8


def test_slices_know_their_neighbours():
    links = slice_neighbours(SLICED)
    assert links.previous == (None, 0, None)
    assert links.following == (1, None, None)


NEEDS = {
    # a forward: the stage before and the slice before
    "0F0": "", "0F1": "0F0", "1F1": "0F1 1F0", "1F2": "0F2",
    # a backward: its forward, the stage after and the slice after
    "2B1": "2F1", "2B0": "2F0 2B1", "0B0": "0F0 1B0 0B1", "0B2": "0F2 1B2",
    # every other operation: one action
    "1W0": "1B0", "1R0": "1F0", "1O0": "1F0", "1L0": "1O0", "1SEND_F0": "1F0", "1RECV_F0": "0SEND_F0",
    "1SEND_B0": "1B0", "1RECV_B0": "2SEND_B0",
}  # fmt: skip


@pytest.mark.parametrize("action", NEEDS)
def test_an_action_needs_what_makes_its_input_and_a_slice_its_neighbour(action):
    assert needed_by(action) == {*NEEDS[action].split()}


def test_backward_waits_for_the_recompute_and_load_of_its_own_chunk():
    assert needed_by("2B1", optional=["2R1", "2L0", "1L1"]) == {"2F1", "2R1"}
    assert needed_by("2B1", optional=["2L1", "2O1"]) == {"2F1", "2L1"}
