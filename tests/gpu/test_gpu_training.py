"""On a GPU training through Megatron keeps its numbers and its planned memory, and copies lie overlapped with compute."""

import pytest
import torch

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
