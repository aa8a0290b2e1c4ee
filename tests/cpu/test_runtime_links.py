"""Messages between two ranks arrive in the order they were sent, per direction, whatever the other direction does."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.plan import EppError, Op, simulate
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.placement import Placement
from megatron_epp.runtime.links import links
from tests.support.runtime.link_runs import (
    both_ways,
    cross_talk,
    each_way,
    groups,
    in_slots,
    made,
    meet,
    strided_and_released,
    without_slots,
)
from tests.support.runtime.rank_processes import Ranks
from tests.support.runtime.runtime_plans import looped, planned, v_shape


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as job:
        yield job


def test_activations_and_gradients_keep_their_order_and_do_not_mix(ranks):
    _, (activations, gradients) = ranks.run(cross_talk)
    assert activations == [[[float(i)] * 3] * 2 for i in range(4)]
    assert gradients == [[10.0 + i] * 5 for i in range(4)]


def test_both_ranks_may_send_before_they_receive(ranks):
    assert ranks.run(both_ways) == [1.0, 0.0]


def test_strides_are_no_matter_and_the_sender_may_drop_its_tensor_at_once(ranks):
    _, (transposed, whole) = ranks.run(strided_and_released)
    assert transposed == torch.arange(6.0).reshape(2, 3).t().tolist()
    assert whole == torch.arange(1000.0).tolist()


def test_every_communicator_spans_the_pipeline(ranks):
    assert ranks.run(groups) == [((0, 1), [[0, 1]] * 4)] * 2


def test_activations_that_travel_both_ways_have_a_communicator_each_way(ranks):
    assert ranks.run(each_way) == [(4, [1.0, 11.0]), (4, [0.0, 10.0])]


@pytest.mark.parametrize("several_stages", [False, True])
def test_every_group_has_the_time_limit_and_those_of_messages_have_options_of_their_own(ranks, several_stages):
    num_links = 4 if several_stages else 2
    expected = [(None, f"options {i}", 77.0) for i in range(num_links)] + [("gloo", None, 77.0)] * 2
    assert ranks.run(made, several_stages) == [expected] * 2


def test_at_start_up_every_way_is_used_once_in_one_order(ranks):
    (first, after), (second, _) = ranks.run(meet, False)
    assert first == [("sent", [0], 1, "activations"), ("heard", [1], 1, "gradients")]
    assert second == [("heard", [0], 0, "activations"), ("sent", [1], 0, "gradients")]
    assert after == 1.0


def test_where_ranks_have_several_stages_all_communicators_are_used(ranks):
    (first, _), (second, _) = ranks.run(meet, True)
    names = ["activations", "gradients", "activations_down", "gradients_up"]
    assert [name for *_, name in first] == [name for *_, name in second] == names
    assert [kind for kind, *_ in first] == ["sent", "heard", "heard", "sent"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_whose_messages_would_share_a_communicator_are_refused(monkeypatch, num_ranks):
    """With a bound device, NCCL's groups have one for all ranks; two ranks need no more."""
    monkeypatch.setattr(links.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id="cuda:1")))
    expected = pytest.raises(EppError, match="device_id=cuda:1") if num_ranks > 2 else nullcontext()
    with expected:
        links._check_pairs(num_ranks)


PLACEMENTS = [
    Placement(kind, num_ranks, num_chunks).rank_of
    for num_ranks in (1, 2, 3, 4, 7, 64)
    for kind, num_chunks in (("looped", 1), ("looped", 3), ("v", 2))
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda ranks: f"{max(ranks) + 1} ranks, {len(ranks)} stages")
def test_ranks_that_block_until_their_peer_is_there_all_get_through_side_by_side(placement):
    """As NCCL's do at a first message: a rank goes on only when both are at the same meeting. Many ranks take no more rounds
    than few: those of two pairs of neighbours, and of the last rank with the first.
    """
    used = directions(placement)
    todo = {rank: [way for way in used if rank in way[:2]] for rank in placement}
    rounds = 0
    while any(todo.values()):
        rounds += 1
        heads = {rank: todo[rank][0] for rank in todo if todo[rank]}
        met = [way for way in heads.values() if all(heads.get(rank) == way for rank in way[:2])]
        assert met, f"ranks wait in a circle: {heads}"
        for rank in {rank for way in met for rank in way[:2]}:
            todo[rank].pop(0)
    of_pair = max(Counter(tuple(sorted(way[:2])) for way in used).values(), default=0)
    assert rounds <= 3 * of_pair


@pytest.mark.parametrize("plan", [planned((30, 4, 9), (1,) * 4), v_shape(), looped()])
def test_every_message_of_a_plan_goes_a_way_that_was_used(plan):
    messages = {(one.src_rank, one.dst_rank, one.action.op is Op.SEND_B) for one in simulate(plan).messages()}
    assert messages == set(directions(plan.placement)), "and no other is set up"


def test_messages_travel_in_slots_that_are_used_again_whatever_order_they_are_needed_in(ranks):
    """Eight messages each way in two slots: of every two that are posted, the second is needed first."""
    slots, received = zip(*ranks.run(in_slots), strict=True)
    assert slots == ({(0, 1, False): 2, (1, 0, True): 2},) * 2
    assert received == ([[100.0 + i] * (1 + i % 3) for i in range(8)], [[float(i)] * (1 + i % 3) for i in range(8)])


def test_a_message_without_a_slot_and_one_that_does_not_fit_are_refused(ranks):
    assert ranks.run(without_slots) == [
        ("a message of 12 bytes does not fit a slot of 8", "pipeline rank 0 has no slot left for a message of rank 1"),
        ("a message of 12 bytes does not fit a slot of 8", "pipeline rank 1 has no slot left for a message of rank 0"),
    ]
