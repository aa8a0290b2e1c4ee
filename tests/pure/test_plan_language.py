"""Actions, chunks, steps of several actions, the rules of dependency, and the table of operations."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, Op, PlanError, Prediction, Segment, operations
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.grid import from_grid, to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.operations import At, Before, Collective, Need, Operation, Presence, operation, register
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.relations import deps
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from tests.support.plan.small_plans import chunk, one_f_one_b

SLICED = (chunk((0, 0, 5)), chunk((0, 5, 8), (1, 0, 2)), chunk((2, 0, 4)))


def needed_by(text, optional=()):
    return {str(action) for action in deps(SLICED, 3, [Action.parse(word) for word in optional])(Action.parse(text))}


@given(st.sampled_from(Op.known()), st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_action_prints_and_parses_back(op, stage, number):
    action = Action(op, stage, number)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X5", "2f5", "-1F0", "2F5 ", "2SEND5", "2.0F1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def test_chunks_are_batched_split_or_hybrid_and_slices_know_their_neighbours():
    lengths, links = (8, 2, 4), slice_neighbours(SLICED)
    assert [c.kind(lengths) for c in SLICED] == ["split", "hybrid", "batched"]
    assert [c.slice_of(lengths) for c in SLICED[1:]] == [Segment(0, 5, 8), None]
    assert (SLICED[1].num_tokens, SLICED[1].padded_tokens(4)) == (5, 8)
    assert (links.previous, links.following) == (((), (0,), ()), ((1,), (), ()))


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


K, SPREAD = Op.define("K"), Op.define("SPREAD_K")
OF_FORWARDS = Need(Op.F, At.LAST, carries=Collective(SPREAD))
SHARD = Operation(op=K, text="loss shard", presence=Presence.COMPLETE, sites=operations.of_ranks, needs=(OF_FORWARDS,))


def test_an_added_operation_is_known_with_its_collectives_until_it_is_removed():
    try:
        assert register(SHARD) is SHARD
        assert register(SHARD) is SHARD
        assert operation(K) is SHARD
        assert operation(SPREAD).text == f"collective {SPREAD}"
    finally:
        operations.unregister(K)
    for op in (K, SPREAD):
        with pytest.raises(PlanError, match=f"operation {op} has no definition"):
            operation(op)


def test_another_definition_of_a_name_is_refused():
    with pytest.raises(ValueError, match=f"operation {Op.F} is already defined"):
        register(replace(operation(Op.F), text="another"))
    assert operation(Op.F).text != "another"


@pytest.mark.parametrize(
    "changes", [{"needs": (Need(SPREAD, At.LAST),)}, {"before": (Before(SPREAD, Need(K, At.EVERY)),)}], ids=["needs", "before"]
)
def test_an_operation_that_names_an_unknown_one_is_refused(changes):
    with pytest.raises(ValueError, match=f"operation {K} names {SPREAD}, which is not defined"):
        register(replace(SHARD, **{"needs": (), **changes}))
    with pytest.raises(PlanError):
        operation(K)


def test_what_is_received_has_a_colour_for_each_kind() -> None:
    assert len({operation(op).colour for op in (Op.RECV_F, Op.RECV_B, Op.F, Op.B)}) == 4


def joined(plan, rank, at):
    """The plan with two neighbouring steps of a rank as one, which takes as long as the longer of them."""
    row = plan.ranks[rank]
    one, two = row[at : at + 2]
    sizes = {name: getattr(one, name) + getattr(two, name) for name in ("alloc_bytes", "free_bytes")}
    both = one._replace(time_us=max(one.time_us, two.time_us), also=two.actions, **sizes)
    ranks = (*plan.ranks[:rank], (*row[:at], both, *row[at + 2 :]), *plan.ranks[rank + 1 :])
    return replace(plan, ranks=ranks, predicted=Prediction.none(plan.num_ranks), cap_bytes=(1 << 40,) * plan.num_ranks)


def first_pair(plan, rank):
    return next(i for i, (one, two) in enumerate(pairwise(plan.actions(rank))) if (one.op, two.op) == (Op.B, Op.F))


def test_a_step_of_two_actions_is_checked_simulated_lowered_and_survives_text():
    plan = one_f_one_b()
    braided = joined(plan, 0, first_pair(plan, 0))
    assert check(braided) == []
    assert simulate(braided).makespan_us < simulate(plan).makespan_us
    assert from_json(to_json(braided)) == braided
    grid = to_grid(braided)
    assert "+" in grid
    assert from_grid(grid) == tuple(plan.actions(rank) for rank in range(plan.num_ranks))
    rows = lower(braided)
    assert (sorted(map(str, rows[0])), blocked([rows])) == (sorted(map(str, lower(plan)[0])), [])


def test_a_step_whose_actions_need_each_other_is_refused_and_a_deadlock_by_way_of_another_rank():
    plan = one_f_one_b()
    chunk = plan.actions(1)[0].chunk
    row = [step for step in plan.ranks[0] if step.action.chunk != chunk]
    forward, backward = (next(s for s in plan.ranks[0] if s.action == Action(op, 0, chunk)) for op in (Op.F, Op.B))
    both = forward._replace(also=(backward.action,))
    faults = check(replace(plan, ranks=((both, *row), *plan.ranks[1:]), predicted=Prediction.none(plan.num_ranks)))
    assert any("deadlock" in str(fault) for fault in faults)
    faults = check(joined(plan, plan.placement[-1], 0))  # a chunk's forward and its backward
    assert any("one action of its step needs the other" in str(fault) for fault in faults)


def test_backwards_of_a_loss_group_wait_for_all_its_forwards_on_the_last_stage():
    plan = one_f_one_b()
    last = plan.num_stages - 1
    row = plan.actions(plan.placement[last])
    early, late = row[0].chunk, [a for a in row if a.op is Op.F][-1].chunk
    assert check(replace(plan, loss_groups=((early,), (late,)))) == []
    grouped = replace(plan, loss_groups=((early, late),))
    assert from_json(to_json(grouped)) == grouped
    faults = check(grouped)
    assert faults
    assert f"runs before {last}F{late}" in str(faults[0])
    assert "name a chunk twice" in str(check(replace(plan, loss_groups=((0,), (0,))))[0])
