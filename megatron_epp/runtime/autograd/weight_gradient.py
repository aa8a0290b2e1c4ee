"""Gradient of a weight that is computed outside of autograd's graph, and reaches the weight through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""Function from the kept part of a layer's input and its output's gradient to its weight's gradient."""


def gradient_node(weight: Tensor, x: Tensor, grad: Tensor, product: Product) -> Tensor:
    """Return the root of a graph whose backward computes ``product(x, grad)`` and runs the hooks on the weight."""
    with torch.enable_grad():
        node: Tensor = _Gradient.apply(weight, x, grad, product)
    return node


def give_gradient(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    """Compute a weight's gradient and pass it to the weight through autograd, so that hooks on the weight run."""
    nothing = weight.new_empty(0)
    node = gradient_node(weight, nothing, nothing, lambda *_: compute())
    torch.autograd.backward(node, torch.zeros_like(node))


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, grad: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x, grad)
        ctx.product = product
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.product(*ctx.saved_tensors), None, None, None
