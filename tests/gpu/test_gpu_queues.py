"""The premise of `plan.proof.deadlock`: how a GPU's hardware queues start what streams hand them."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_epp.tools.machine.queue_check import check_queues, queue_plans
from tests.support.runtime.kernel_proofs import prove

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SCRIPT = """
import torch

ahead, after = torch.cuda.Stream(), torch.cuda.Stream()
one, other = torch.ones(1, device="cuda"), torch.ones(1, device="cuda")
for stream, tensor in ((ahead, one), (after, other)):  # load the kernels first
    with torch.cuda.stream(stream):
        tensor.add_(1)
        torch.cuda._sleep(1)
torch.cuda.synchronize()
long, short = torch.cuda.Event(), torch.cuda.Event()
with torch.cuda.stream(ahead):
    torch.cuda._sleep(2_000_000_000)
    long.record()
    one.add_(1)
with torch.cuda.stream(after):
    other.add_(1)
    short.record()
short.synchronize()
print("behind" if long.query() else "overlapped")
torch.cuda.synchronize()
"""


def order(connections: int) -> str:
    """Whether a kernel of another stream overlapped a long one, or ran behind it, with a second of that one issued between."""
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("connections", "wanted"), [(1, "behind"), (32, "overlapped")])
def test_with_one_hardware_queue_nothing_starts_before_what_was_issued_ahead_and_with_many_streams_overlap(connections, wanted):
    assert order(connections) == wanted


# ---- kernels, and what `megatron-epp first-run` checks: plans of messages over NCCL --------------------------------------


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
