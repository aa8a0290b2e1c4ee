"""On a GPU a loss by blocks agrees with plain cross entropy and takes the memory that plans count, by Liger's kernel or not."""

import importlib.util

import pytest
import torch
from torch.nn import functional

from megatron_epp.plan.sizing import loss_workspace_bytes
from megatron_epp.runtime.loss import token_blocks as block_loss
from megatron_epp.runtime.loss.kernels import LIGER, LossCase, explain
from megatron_epp.runtime.loss.token_blocks import Head, block_losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOKENS, ENTRIES, WIDTH, BLOCK = 4096, 32768, 512, 512


def tensors():
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, WIDTH, device="cuda", generator=generator) for n in (TOKENS, ENTRIES))
    labels = torch.randint(ENTRIES, (TOKENS,), device="cuda", generator=generator)
    return x.bfloat16().requires_grad_(), (weight * WIDTH**-0.5).bfloat16().requires_grad_(), labels


def gradients(loss, inputs):
    """And the most memory that the backward took next to what was there."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(loss, inputs)
    peak = torch.cuda.max_memory_allocated() - before
    return [x.double() for x in found], peak


@pytest.mark.parametrize("by_liger", [False, True], ids=["torch", "Liger"])
def test_gradients_agree_and_the_peak_is_what_plans_count(by_liger, monkeypatch):
    if by_liger and importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("needs Liger: pip install 'megatron-epp[liger]'")
    if by_liger:
        assert explain(LossCase("cuda", torch.bfloat16, ENTRIES)) == (LIGER, "")
    else:
        monkeypatch.setattr(block_loss, "explain", lambda case: (None, ""))
    x, weight, labels = tensors()
    exact = functional.cross_entropy(x.double() @ weight.double().t(), labels, reduction="sum")
    wanted, _ = gradients(exact, (x, weight))
    losses = block_losses(x, x, weight, labels, Head(BLOCK))
    torch.testing.assert_close(losses.sum().double(), exact, rtol=1e-3, atol=0)
    found, peak = gradients(losses.sum(), (x, weight))
    for tensor, expected in zip(found, wanted, strict=True):
        assert (tensor - expected).norm() <= 1e-2 * expected.norm()
    beside = TOKENS * (2 * WIDTH + 64) + 2**22  # the input's gradient, a few numbers of every token, the allocator's rounding
    assert peak <= loss_workspace_bytes(BLOCK, ENTRIES, WIDTH, 2, in_place=by_liger) + beside


def test_liger_is_no_coarser_than_torch(monkeypatch):
    """Where tokens count or do not. Both are measured from the exact gradient of the same bf16 values."""
    if explain(LossCase("cuda", torch.bfloat16, ENTRIES))[0] is None:
        pytest.skip("needs Liger: pip install 'megatron-epp[liger]'")
    x, weight, labels = tensors()
    mask = (torch.arange(TOKENS, device="cuda") % 3 != 0).float()
    exact = functional.cross_entropy(x.double() @ weight.double().t(), labels, reduction="none")
    wanted, _ = gradients((exact * mask).sum(), (x, weight))

    def errors():
        found, _ = gradients((block_losses(x, x, weight, labels, Head(BLOCK)) * mask).sum(), (x, weight))
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]

    by_liger = errors()
    monkeypatch.setattr(block_loss, "explain", lambda case: (None, ""))
    assert all(found <= 1.02 * own for found, own in zip(by_liger, errors(), strict=True))
