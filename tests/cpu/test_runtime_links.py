"""Messages between two ranks arrive in the order they were sent, per direction, whatever the other direction does."""

from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_epp.plan import EppError, Op, simulate
from megatron_epp.plan.communicators import Direction, directions
from megatron_epp.plan.placement import Placement
from megatron_epp.runtime.links import links
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups
from tests.support.runtime.rank_processes import Ranks
from tests.support.runtime.runtime_plans import looped, planned, v_shape

LOOPED = directions((0, 1, 0, 1))
"""Directions of messages where two ranks have two stages each."""


def strided_and_released(rank, links):
    """Rank 0 sends two tensors, one transposed, and lets go of the second's storage before that is received."""
    if rank == 0:
        square = torch.arange(6.0).reshape(2, 3)
        links.send(square.t(), peer=1, gradient=False)
        whole = torch.arange(1000.0)
        links.send(whole, peer=1, gradient=False)
        whole.data = torch.empty(1)
        junk = [torch.zeros(1000) for _ in range(50)]
        torch.distributed.barrier(links.figures)
        links.finish_sends()
        return len(junk)
    first = links.post_receive((3, 2), torch.float32, torch.device("cpu"), 0, gradient=False)
    torch.distributed.barrier(links.figures)
    second = links.post_receive((1000,), torch.float32, torch.device("cpu"), 0, gradient=False)
    return [receive.wait().tolist() for receive in (first, second)]


def each_way(rank, links):
    """Send activations both ways; return which communicators are one, and the message that each rank gets from the other."""
    made = Links.create(links.ranks, links.ranks, Groups(), LOOPED)
    groups = made.activations, made.activations_down, made.gradients, made.gradients_up
    for gradient in (False, True):
        made.send(torch.tensor([rank + 10.0 * gradient]), peer=1 - rank, gradient=gradient)
    receives = [made.post_receive((1,), torch.float32, torch.device("cpu"), 1 - rank, gradient) for gradient in (False, True)]
    received = [receive.wait().item() for receive in receives]
    made.finish_sends()
    return len(set(groups)), received


def made(rank, links, several_stages):
    """Ranks, backend and options that each group is made with, and its time limit in seconds; options are counted."""
    numbers, made = count(), []

    def create(ranks, timeout, backend, pg_options):
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        made.append(
            (tuple(ranks), backend, pg_options, group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        )
        return group

    groups = Groups(timedelta(seconds=77), create)
    Links.create(links.ranks, links.ranks, groups, LOOPED if several_stages else None, lambda: f"options {next(numbers)}")
    return made


def meet(rank, links, several_stages):
    """Messages at the start-up of a pipeline, as ``(kind, from, to)``, and that links work afterwards."""
    seen = []
    made = Links.create(links.ranks, links.ranks, Groups(), LOOPED if several_stages else None)
    send, receive = dist.send, dist.recv

    def noted_send(tensor, to, group):
        seen.append(("sent", tensor.tolist(), to, _name(made, group)))
        send(tensor, to, group=group)

    def noted_receive(tensor, source, group):
        receive(tensor, source, group=group)
        seen.append(("heard", tensor.tolist(), source, _name(made, group)))

    dist.send, dist.recv = noted_send, noted_receive
    try:
        made.connect(torch.device("cpu"))
    finally:
        dist.send, dist.recv = send, receive
    made.send(torch.tensor([float(rank)]), peer=1 - rank, gradient=False)  # before either receives
    received = made.post_receive((1,), torch.float32, torch.device("cpu"), 1 - rank, gradient=False).wait().item()
    made.finish_sends()
    return seen, received


def _name(links, group):
    names = ("activations", "gradients", "activations_down", "gradients_up")
    return next(name for name in names if getattr(links, name) is group)


def in_slots(rank, links):
    """Send eight messages of other sizes and receive as many in slots; return the numbers of slots, and what was received."""
    slots, cpu, received = {Direction(0, 1, False): 2, Direction(1, 0, True): 2}, torch.device("cpu"), {}
    links.open_slots(slots, 3 * 8, cpu)
    storages = [slot.data_ptr() for ring in links._rings.values() for slot in ring.free]
    for first in range(0, 8, 2):
        posted = [
            links.post_receive((1 + i % 3,), torch.float64, cpu, 1 - rank, gradient=rank == 0) for i in (first, first + 1)
        ]
        for i in (first, first + 1):
            tensor = torch.full((1 + i % 3,), 100.0 * rank + i, dtype=torch.float64)
            links.send(tensor, 1 - rank, gradient=rank == 1)
            tensor.zero_()  # it was copied
        for i in (first + 1, first):
            received[i] = posted[i - first].wait()
    links.finish_sends()
    links.open_slots(slots, 3 * 8, cpu)
    assert sorted(storages) == sorted(slot.data_ptr() for ring in links._rings.values() for slot in ring.free)
    found = {tuple(way): len(ring.free) for way, ring in links._rings.items()}
    links.open_slots({}, 1, cpu)
    return found, [received[i].tolist() for i in range(8)]


def without_slots(rank, links):
    """Errors of a message that is too large for its slot, and of one that finds no slot."""
    cpu, told = torch.device("cpu"), []
    links.open_slots({Direction(1 - rank, rank, False): 1}, 8, cpu)
    for _ in range(2):
        try:
            links.post_receive((3,), torch.float32, cpu, 1 - rank, gradient=False)
        except EppError as error:
            told.append(str(error))
    links.open_slots({}, 1, cpu)
    return tuple(told)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as job:
        yield job


def test_strides_are_no_matter_and_the_sender_may_drop_its_tensor_at_once(ranks):
    _, (transposed, whole) = ranks.run(strided_and_released)
    assert transposed == torch.arange(6.0).reshape(2, 3).t().tolist()
    assert whole == torch.arange(1000.0).tolist()


def test_activations_that_travel_both_ways_have_a_communicator_each_way(ranks):
    assert ranks.run(each_way) == [(4, [1.0, 11.0]), (4, [0.0, 10.0])]


@pytest.mark.parametrize("several_stages", [False, True])
def test_every_group_spans_the_pipeline_with_the_time_limit_and_those_of_messages_have_options_of_their_own(
    ranks, several_stages
):
    num_links = 4 if several_stages else 2
    expected = [((0, 1), None, f"options {i}", 77.0) for i in range(num_links)] + [((0, 1), "gloo", None, 77.0)] * 2
    assert ranks.run(made, several_stages) == [expected] * 2


def test_at_start_up_every_way_is_used_once_in_one_order_and_both_ranks_may_then_send_before_they_receive(ranks):
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
