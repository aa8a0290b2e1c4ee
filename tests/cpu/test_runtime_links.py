"""Links between ranks carry every message once, in as much memory as planned, and the check of them finds what hangs."""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_epp.plan import Chunk, EppError, Op, Segment
from megatron_epp.plan.communicators import Direction, directions
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.message_slots import message_peaks
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.plan.simulation import simulate
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links import links, nccl
from megatron_epp.runtime.links.links import Links, Receive
from megatron_epp.runtime.links.objects import Groups
from megatron_epp.tools.machine import queue_check
from megatron_epp.tools.machine.queue_check import EchoStage, check_queues, queue_plans, run_rank
from tests.support.calls import refusal
from tests.support.runtime.launch_recorder import RecordedStage, record
from tests.support.runtime.plain_stage import HIDDEN
from tests.support.runtime.rank_processes import ranks_fixture
from tests.support.runtime.runtime_plans import looped, planned, v_shape

LOOPED = directions((0, 1, 0, 1))
"""Directions of messages where two ranks have two stages each."""


def strided_and_released(rank, links):
    """Rank 0 sends two tensors, one transposed, and lets go of the second's storage before that is received."""
    if rank == 0:
        links.send(torch.arange(6.0).reshape(2, 3).t(), peer=1, gradient=False)
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
        own = group._get_backend(torch.device("cpu")).options
        made.append((tuple(ranks), backend, pg_options, own._timeout.total_seconds()))
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
    for pair in ((first, first + 1) for first in range(0, 8, 2)):
        posted = [links.post_receive((1 + i % 3,), torch.float64, cpu, 1 - rank, gradient=rank == 0) for i in pair]
        for i in pair:
            tensor = torch.full((1 + i % 3,), 100.0 * rank + i, dtype=torch.float64)
            links.send(tensor, 1 - rank, gradient=rank == 1)
            tensor.zero_()  # it was copied
        received |= {i: receive.wait() for i, receive in reversed([*zip(pair, posted, strict=True)])}
    links.finish_sends()
    links.open_slots(slots, 3 * 8, cpu)
    assert sorted(storages) == sorted(slot.data_ptr() for ring in links._rings.values() for slot in ring.free)
    found = {tuple(way): len(ring.free) for way, ring in links._rings.items()}
    links.open_slots({}, 1, cpu)
    return found, [received[i].tolist() for i in range(8)]


def without_slots(rank, links):
    """Errors of a message that is too large for its slot, and of one that finds no slot."""
    cpu = torch.device("cpu")
    links.open_slots({Direction(1 - rank, rank, False): 1}, 8, cpu)
    told = tuple(refusal(links.post_receive, (3,), torch.float32, cpu, 1 - rank, gradient=False) for _ in range(2))
    links.open_slots({}, 1, cpu)
    return told


ranks = ranks_fixture(2)


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
    assert (second, after) == ([("heard", [0], 0, "activations"), ("sent", [1], 0, "gradients")], 1.0)


def test_where_ranks_have_several_stages_all_communicators_are_used(ranks):
    (first, _), (second, _) = ranks.run(meet, True)
    names = ["activations", "gradients", "activations_down", "gradients_up"]
    assert [name for *_, name in first] == [name for *_, name in second] == names
    assert [kind for kind, *_ in first] == ["sent", "heard", "heard", "sent"]


def test_ranks_whose_messages_would_share_a_communicator_are_refused(monkeypatch):
    """With a bound device, NCCL's groups have one for all ranks; two ranks need no more."""
    monkeypatch.setattr(links.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id="cuda:1")))
    links._check_pairs(2)
    with pytest.raises(EppError, match="device_id=cuda:1"):
        links._check_pairs(3)


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
    assert rounds <= 3 * max(Counter(tuple(sorted(way[:2])) for way in used).values(), default=0)


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


def with_a_silent_rank(rank, plans, width, gpus, limit_s, folder):
    """Run the plans on every rank but the last, which opens its links and then sends nothing."""
    last = dist.get_world_size() - 1
    if rank < last:
        return run_rank(rank, plans, width, gpus, limit_s, folder)
    every, used = range(last + 1), directions(*(one.placement for one in plans))
    links = Links.create(every, every, Groups(timedelta(seconds=60)), used)
    links.connect(torch.device("cpu"))
    links.control.from_each(None)
    time.sleep(60)  # it is killed when the others have ended
    return []


TABLE = SegmentTable.build(Chunk((Segment(0, 0, 3),)), 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_plans_are_sound_and_hold_slices(ranks):
    for plan in queue_plans(ranks).values():
        assert (check(plan), plan.num_ranks) == ([], ranks)
        assert any(chunk.slice_of(plan.lengths) for chunk in plan.chunks)


def test_a_stage_counts_values_of_another_chunk_and_of_the_other_kind():
    stage = EchoStage(0, 2, torch.device("cpu"))
    context = ChunkContext(5, TABLE, SlicedKVCache())
    stage.forward(context, torch.full((3, 2), 5.0, requires_grad=True))
    assert int(stage.wrong) == 0
    stage.forward(context, torch.full((3, 2), 4.0, requires_grad=True))
    assert int(stage.wrong) == 6
    stage.backward(context, torch.zeros(()), torch.full((3, 2), 5.0))
    assert int(stage.wrong) == 12


def test_every_plan_ends_with_every_value_as_it_was_sent_next_to_sums_over_ranks_that_share_stages():
    runs = check_queues(queue_plans(2), width=8, gpus=False, limit_s=60.0, pipelines=2)
    assert [run.num_wrong for run in runs] == [0, 0, 0]
    assert all(run.time_us > 0 and run.num_messages > 0 for run in runs)


def test_a_stage_sums_a_tensor_after_every_action_and_in_the_reduction(monkeypatch):
    sums = []

    def all_reduce(total, group):
        sums.append(group)
        total *= 1 + (len(sums) == 3)  # the third is wrong

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    stage, context = EchoStage(0, 2, torch.device("cpu"), "tensor parallel"), ChunkContext(5, TABLE, SlicedKVCache())
    stage.forward(context, torch.full((3, 2), 5.0, requires_grad=True))
    stage.backward(context, torch.zeros(()), torch.full((3, 2), 5.5))
    assert (sums, int(stage.wrong)) == (["tensor parallel"] * 2, 0)
    stage.reduce_gradients()
    assert len(sums) == 3
    assert int(stage.wrong) > 0


class Recorder:
    """Takes the place of `ProcessGroupNCCL.Options` in a torch without NCCL."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()


@pytest.mark.parametrize("has_nccl", [True, False])
def test_its_links_have_the_options_of_training(monkeypatch, has_nccl):
    """The first thing that a rank makes after its options are the groups of its links."""
    if not (has_nccl and dist.is_nccl_available()):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Recorder), raising=False)
    made = []

    def create(pipeline, control, groups, used, options):
        made.append((options(), groups.timeout))
        raise EppError("enough")

    monkeypatch.setattr(queue_check.Links, "create", create)
    monkeypatch.setattr(queue_check, "uses_nccl", lambda: True)
    monkeypatch.setattr(nccl, "from_each_of_job", lambda mine: [mine, 108])
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    with pytest.raises(EppError, match="enough"):
        run_rank(0, [*queue_plans(4).values()], 8, True, 30.0, "")
    ((options, limit),) = made
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 2, "of 8 links on 108 SMs"
    assert options._timeout == limit


@pytest.mark.parametrize(
    ("backend", "expected"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False), ("cpu:gloo,cuda:gloo", False)]
)
def test_a_group_of_two_backends_takes_tensors_on_gpus_to_nccl(monkeypatch, backend, expected):
    config = distributed_c10d.BackendConfig(dist.Backend(backend))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: str(config))
    assert nccl.uses_nccl() == expected


def test_a_plan_that_hangs_is_reported_with_what_it_waits_for():
    with pytest.raises(EppError, match=r"rank 0, step \d+, action \S+ has not finished after 1 s, waiting for .*rank 1"):
        check_queues(queue_plans(2), width=8, gpus=False, limit_s=1.0, run=with_a_silent_rank)


@dataclass
class _Block:
    storage: StorageWeakRef
    num_bytes: int
    born: int
    streams: set = field(default_factory=set, compare=False)
    held_from: int | None = None
    dropped: int | None = None
    passed: int = 0

    def is_counted(self, at, lead):
        """True if it is in use at a launch, and not as the input that a forward keeps, whose own bytes hold it."""
        if self.dropped is None or at < self.dropped:
            return self.born <= at and (self.held_from is None or at < self.held_from)
        return bool(self.streams) and at < self.passed + lead


class MessageMemory:
    """Blocks of the tensors that a rank sends and receives, in the order of its launches."""

    def __init__(self):
        self.log = None
        self._blocks, self._held = [], []

    def note(self, tensor, stream=None):
        """Note a message, and the stream of the communicator that uses it; return its block."""
        self.poll()
        storage = tensor.untyped_storage()
        block = next((one for one in self._held if one.storage.cdata == storage._weak_ref()), None)
        if block is None:
            block = _Block(StorageWeakRef(storage), storage.nbytes(), len(self.log.launches))
            self._blocks.append(block)
            self._held.append(block)
        if stream is not None:
            block.streams.add(stream)
        return block

    def poll(self):
        """Find the blocks that the host has dropped since the last call."""
        for block in [block for block in self._held if block.storage.expired()]:
            self._held.remove(block)
            block.dropped = len(self.log.launches)
            block.passed = max((self.log.streams[stream].last for stream in block.streams), default=0)

    def peak_bytes(self, lead):
        """Most bytes in use at one launch, where the host is ahead of the device by so many launches."""
        launches = range(len(self.log.launches) + 1)
        return max(sum(block.num_bytes for block in self._blocks if block.is_counted(at, lead)) for at in launches)

    @contextmanager
    def watching(self, log):
        self.log = log
        send, wait = Links.send, Receive.wait

        def noted_send(links, tensor, peer, gradient):
            self.note(tensor)
            send(links, tensor, peer, gradient)

        def noted_wait(receive):
            message = wait(receive)
            block = self.note(message)
            if self.log.action.op is Op.F:
                block.held_from = len(self.log.launches)
            return message

        with patch.object(Links, "send", noted_send), patch.object(Receive, "wait", noted_wait):
            yield


PLANS = {"one stage per rank": lambda: planned((9, 8, 7, 9, 8, 7), (1, 1, 1), chunk_tokens=9), "looped": looped, "v": v_shape}
"""Without split weight gradients, whose own bytes hold the gradients that a backward keeps for them."""
FAR_AHEAD = 10**6


class ReleasingStage(RecordedStage):
    """Drops the storage of an output that is sent, as Megatron does."""

    def release_output(self, output):
        output.data = torch.empty(1).expand(output.shape)


def taken(case):
    """Peak bytes of messages of each rank by the host's lead, and those of the plan."""
    plan = PLANS[case]()
    sizes = tuple(4 * HIDDEN * plan.padded_tokens(chunk) for chunk in range(len(plan.chunks)))
    plan = replace(plan, messages=replace(plan.messages, num_bytes=sizes))
    near, far = [], []
    for rank in range(plan.num_ranks):
        memory = MessageMemory()
        record(plan, rank, make_stage=ReleasingStage, memory=memory)
        near.append(memory.peak_bytes(0))
        far.append(memory.peak_bytes(FAR_AHEAD))
    return near, far, message_peaks(plan, lower(plan))


@pytest.mark.parametrize("case", PLANS)
def test_messages_in_slots_take_no_more_than_is_planned_however_far_the_host_is_ahead(case):
    near, far, planned = taken(case)
    assert near == far
    assert all(0 < size <= most for size, most in zip(far, planned, strict=True))
