"""The check of links runs whole plans: it notices values of another chunk, and says what a plan that hangs waits for."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_epp.plan import Chunk, EppError, Segment, check
from megatron_epp.plan.communicators import directions
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links import nccl
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups
from megatron_epp.runtime.tools import queue_check
from megatron_epp.runtime.tools.queue_check import EchoStage, check_queues, queue_plans, run_rank


def with_a_silent_rank(rank, plans, width, gpus, limit_s, folder):
    """Run the plans on every rank but the last, which opens its links and then sends nothing."""
    last = dist.get_world_size() - 1
    if rank < last:
        return run_rank(rank, plans, width, gpus, limit_s, folder)
    links = Links.create(
        range(last + 1), range(last + 1), Groups(timedelta(seconds=60)), directions(*(one.placement for one in plans))
    )
    links.connect(torch.device("cpu"))
    links.control.from_each(None)
    time.sleep(60)  # it is killed when the others have ended
    return []


TABLE = SegmentTable.build(Chunk((Segment(0, 0, 3),)), 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_plans_are_sound_and_hold_slices(ranks):
    for plan in queue_plans(ranks).values():
        assert check(plan) == []
        assert plan.num_ranks == ranks
        assert any(chunk.slice_of(plan.lengths) for chunk in plan.chunks)


def test_a_stage_counts_values_of_another_chunk_and_of_the_other_kind():
    stage = EchoStage(0, 2, torch.device("cpu"))
    context = ChunkContext(5, TABLE, SlicedKVCache())
    stage.forward(context, torch.full((3, 2), 5.0, requires_grad=True))
    assert int(stage.wrong) == 0
    stage.forward(context, torch.full((3, 2), 4.0, requires_grad=True))
    assert int(stage.wrong) == 6
    stage.backward(context, torch.zeros(()), torch.full((3, 2), 5.0), keep_weights=False)
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
    stage.backward(context, torch.zeros(()), torch.full((3, 2), 5.5), keep_weights=False)
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
