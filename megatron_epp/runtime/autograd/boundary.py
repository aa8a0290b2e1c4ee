"""Where a stage's graph begins: takes the gradient of what the stage was sent, without holding what was sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arrival:
    """What the previous stage sent, as the start of a graph.

    A leaf would hold the tensor until its gradient is there. So autograd alone keeps it, as far as it needs it.

    Attributes:
        gradient: None until the backward.
    """

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """The tensor as part of a graph."""
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
