"""The premise of `plan.check.deadlock`: how a GPU's hardware queues start what streams hand them."""

import os
import subprocess
import sys

import pytest
import torch

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


def test_with_one_hardware_queue_nothing_starts_before_what_was_issued_ahead_of_it():
    assert order(1) == "behind"


def test_with_many_hardware_queues_streams_overlap():
    assert order(32) == "overlapped"
