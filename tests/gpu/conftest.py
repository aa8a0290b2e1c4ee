"""Tests on GPUs compare in fp32, also in NVIDIA's containers, which multiply fp32 matrices in TF32."""

import pytest
import torch

from megatron_epp.launch.machine import NO_TF32, has_room_for


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    for name, value in NO_TF32.items():
        monkeypatch.setenv(name, value)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def need_room():
    def need(num_ranks):
        if not has_room_for(num_ranks):
            pytest.skip("needs more GPUs, or NCCL 2.30 or later, with which ranks share one")

    return need
