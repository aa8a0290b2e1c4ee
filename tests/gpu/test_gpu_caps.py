"""Memory of a GPU that a cap lets plans fill can be filled."""

from argparse import Namespace

import pytest
import torch

from megatron_epp.cost.memory import SETUP_MARGIN_BYTES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MOST_GB = 1 << 20


def test_a_cap_above_the_device_is_lowered_to_what_torch_can_have():
    from megatron_epp.mcore.training.caps import cap_bytes  # imports Megatron

    kept, gone = (torch.ones(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    del gone  # torch keeps its memory
    cap = cap_bytes(Namespace(epp_memory_cap_gb=MOST_GB))
    _, total = torch.cuda.mem_get_info()
    assert SETUP_MARGIN_BYTES < cap <= total - SETUP_MARGIN_BYTES
    rest = torch.empty(cap - kept.nbytes, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() >= cap
    del rest
    torch.cuda.empty_cache()
