"""What `--epp-split-weight-gradient` asks of a model's linear layers."""

import sys
import types

import pytest
import torch
from torch import nn

from megatron_epp.mcore import linear
from megatron_epp.schedule import EppError


class OtherLinear(nn.Linear):
    """As Transformer Engine's: it has a delayed weight gradient of its own and is no layer of Megatron's."""

    def backward_dw(self) -> None:
        """Nothing here asks for it."""


def test_layers_that_are_not_megatrons_own_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LayerNorm(4), OtherLinear(4, 4))
    with pytest.raises(EppError, match=r"--epp-split-weight-gradient cannot split 1 \(OtherLinear\).*--transformer-impl local"):
        linear.split_weight_gradients([model])


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "fp32"), (torch.bfloat16, "fp16")])
def test_gradient_accumulation_fusion_adds_to_the_main_gradient_in_its_own_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: str
) -> None:
    called = []

    def accumulate(name: str, x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        called.append(name)
        main_grad += grad.t() @ x

    kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
    for name in ("fp32", "fp16"):
        setattr(kernels, f"wgrad_gemm_accum_{name}", lambda *tensors, name=name: accumulate(name, *tensors))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    weight = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    weight.main_grad = torch.ones(3, 2, dtype=dtype)
    x, grad = torch.ones(5, 1, 2, dtype=dtype), torch.ones(5, 1, 3, dtype=dtype)
    stands_for_it = linear.weight_gradient(weight, None, True, x, grad)
    assert called == [kernel]
    assert torch.equal(weight.main_grad, torch.full((3, 2), 6.0, dtype=dtype))
    assert weight.grad_added_to_main_grad
    assert stands_for_it.shape == weight.shape
