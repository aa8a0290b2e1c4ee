"""Start of a stage's autograd graph: receives the gradient of the stage's input without holding the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arrival:
    """Input of a stage, received from the previous stage, as the start of an autograd graph.

    A leaf would hold the tensor until its gradient is computed. Here only autograd keeps it, as long as it needs it.

    Attributes:
        gradient: gradient of the input; None until the backward.
    """

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the tensor as part of a graph."""
        return _Enter.apply(torch.empty(0, requires_grad=True), hidden, self)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = grad
        return None, None, None
