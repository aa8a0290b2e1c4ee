"""On a GPU training through Megatron keeps its numbers, its cap and its planned memory, and copies lie beside compute."""

from argparse import Namespace

import pytest
import torch

from megatron_epp.cost.memory import SETUP_MARGIN_BYTES
from scripts.bench.gpu import bench as bench_gpu
from scripts.bench.gpu.runs import Launches, Sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return bench_gpu.Parts(Sizes.small(), Launches(tmp_path_factory.mktemp("runs"), 600))


def test_numbers_in_bf16_are_as_near_to_fp32_as_those_of_megatron(bench):
    part = bench.parity()
    assert part["met"], part


def test_the_planned_peak_is_the_measured_one(bench):
    part = bench.peaks()
    assert part["rows"]["under a cap"]["recompute_share"] > 0
    assert part["met"], part


def test_copies_lie_beside_compute(bench):
    part = bench.copies()
    assert part["offload_share"] > 0
    assert part["hidden_share"] > 0.5, part


def test_a_cap_above_the_device_is_lowered_to_what_torch_can_have():
    from megatron_epp.mcore.training.caps import cap_bytes  # imports Megatron

    kept, gone = (torch.ones(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    del gone  # torch keeps its memory
    cap = cap_bytes(Namespace(epp_memory_cap_gb=1 << 20))
    _, total = torch.cuda.mem_get_info()
    assert SETUP_MARGIN_BYTES < cap <= total - SETUP_MARGIN_BYTES
    rest = torch.empty(cap - kept.nbytes, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() >= cap
    del rest
    torch.cuda.empty_cache()
