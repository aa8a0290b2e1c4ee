"""Split weight gradients of Megatron's linear layers: the changes of `--epp-split-weight-gradient` to a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    prepare_input_tensors_for_wgrad_compute,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_epp.mcore.model import delayed
from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.weights import Linear, WeightGradients


def split_weight_gradients(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Make every linear layer of a model chunk pass its weight gradient to the chunk's `weight_gradients`.

    Megatron's own layers compute their output here (`_forward`); Transformer Engine's delay their gradients themselves
    (`delayed.take_over`). An output layer that is given the embedding's weight stays unchanged: its gradient is added to the
    embedding's.

    Raises:
        EppError: the model has a linear layer that cannot delay its weight's gradient.
    """
    for model in models:
        gradients = WeightGradients()
        model.weight_gradients = gradients
        for name, module in model.named_modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module._forward_impl = functools.partial(_forward, module, module._forward_impl, gradients)
            elif hasattr(module, "backward_dw") and next(module.parameters(recurse=False), None) is not None:
                if obstacle := delayed.obstacle(module):
                    kind = type(module).__name__
                    raise EppError(f"--epp-split-weight-gradient cannot split {name} ({kind}): {obstacle}, or leave it out")
                delayed.take_over(module, gradients)
    return models


def _forward(
    module: torch.nn.Module,
    original: Callable[..., Tensor],
    gradients: WeightGradients,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """Replace a module's `_forward_impl`. The original runs if no gradient is needed, or with the weight of another module."""
    if not (torch.is_grad_enabled() and input.requires_grad and weight.requires_grad and weight is module.weight):
        return original(input=input, weight=weight, bias=bias, **options)
    tp_group, sequence_parallel = options["tp_group"], options["sequence_parallel"]
    if sequence_parallel:
        x = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    else:
        x = copy_to_tensor_model_parallel_region(input, group=tp_group) if options["allreduce_dgrad"] else input
    product = functools.partial(
        weight_gradient, weight, tp_group if sequence_parallel else None, options["gradient_accumulation_fusion"]
    )
    output = gradients.linear(x, input, Linear(weight, product))
    return output if bias is None else output + bias


def weight_gradient(weight: Tensor, gather_over: Any, accumulate: bool, x: Tensor, grad: Tensor) -> Tensor:
    """Compute a weight's gradient as Megatron's own backward does.

    Args:
        weight: the weight, ``[out, in]``.
        gather_over: with sequence parallelism the tensor-parallel group, whose ranks each hold a part of the tokens of `x`.
        accumulate: add the gradient to the weight's `main_grad` with the fused kernel of `--gradient-accumulation-fusion`; the
            returned tensor is then a placeholder, as elsewhere in Megatron.
        x: ``[tokens, 1, in]``.
        grad: ``[tokens, 1, out]``.
    """
    if gather_over is not None:
        x = gather_from_sequence_parallel_region(x, group=gather_over)
    grad, x = prepare_input_tensors_for_wgrad_compute(grad, x)
    if not accumulate:
        return grad.t().matmul(x)
    import fused_weight_gradient_mlp_cuda as kernels

    in_fp32 = weight.main_grad.dtype == torch.float32
    (kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16)(x, grad, weight.main_grad)
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight, dtype=x.dtype) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
