"""The checks of `megatron-epp first-run` pass on this machine's GPUs: kernels, and plans of messages over NCCL."""

import pytest
import torch

from megatron_epp.runtime.tools.kernel_proofs import prove
from megatron_epp.runtime.tools.queue_check import check_queues, queue_plans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_the_chosen_kernel_of_every_type_holds_against_attention_in_fp64():
    proofs = list(prove("cuda", 128, 8, 2, 1024))
    assert [one.dtype for one in proofs if one.is_chosen] == ["bfloat16", "float16", "float32"]
    assert [one for one in proofs if one.is_chosen and not one.holds] == []


@pytest.mark.parametrize("pipelines", [1, 2])
def test_plans_of_messages_end_and_every_value_arrives_as_it_was_sent(pipelines, need_room):
    ranks = max(2, torch.cuda.device_count() // pipelines)
    need_room(ranks * pipelines)
    runs = check_queues(queue_plans(ranks), width=16384, gpus=True, limit_s=60.0, pipelines=pipelines)
    assert [run.num_wrong for run in runs] == [0, 0, 0]
