"""The check of links runs whole plans: it notices values of another chunk, and says what a plan that hangs waits for."""

import pytest
import torch

from megatron_epp.plan import Chunk, EppError, Segment, check
from megatron_epp.runtime.attention.kv_cache import KVRelay
from megatron_epp.runtime.attention.layout import SegmentTable
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.tools.queue_check import EchoStage, check_queues, queue_plans
from tests.support.runtime.queue_runs import with_a_silent_rank

TABLE = SegmentTable.build(Chunk((Segment(0, 0, 3),)), 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_plans_are_sound_and_hold_slices(ranks):
    for plan in queue_plans(ranks).values():
        assert check(plan) == []
        assert plan.num_ranks == ranks
        assert any(chunk.slice_of(plan.lengths) for chunk in plan.chunks)


def test_a_stage_counts_values_of_another_chunk_and_of_the_other_kind():
    stage = EchoStage(0, 2, torch.device("cpu"))
    context = ChunkContext(5, TABLE, KVRelay())
    stage.forward(context, torch.full((3, 2), 5.0, requires_grad=True))
    assert int(stage.wrong) == 0
    stage.forward(context, torch.full((3, 2), 4.0, requires_grad=True))
    assert int(stage.wrong) == 6
    stage.backward(context, torch.zeros(()), torch.full((3, 2), 5.0), keep_weights=False)
    assert int(stage.wrong) == 12


def test_every_plan_ends_with_every_value_as_it_was_sent():
    runs = check_queues(queue_plans(2), width=8, gpus=False, limit_s=30.0)
    assert [run.num_wrong for run in runs] == [0, 0, 0]
    assert all(run.time_us > 0 and run.num_messages > 0 for run in runs)


def test_a_plan_that_hangs_is_reported_with_what_it_waits_for():
    with pytest.raises(EppError, match=r"rank 0, step \d+, action \S+ has not finished after 1 s, waiting for .*rank 1"):
        check_queues(queue_plans(2), width=8, gpus=False, limit_s=1.0, run=with_a_silent_rank)
