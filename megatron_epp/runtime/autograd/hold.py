"""Tensors held as autograd's saved tensors, so that hooks that count or offload saved tensors apply to them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.attention.kernels.base import Saved


class Hold:
    """Holds tensors in a graph node of their own until they are taken."""

    __slots__ = ("_node",)

    def __init__(self, *tensors: Tensor) -> None:
        with torch.enable_grad():
            self._node: Tensor | None = _Node.apply(torch.empty(0, requires_grad=True), *tensors)

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors and release them. May be called once."""
        assert self._node is not None  # taken once
        node: Any = self._node.grad_fn
        tensors = tuple(node.saved_tensors)
        self._node = None
        return tensors


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class Attended:
    """Attention output of one layer for a chunk, for a layer that is recomputed without its attention.

    The first forward keeps it, the second takes it.
    """

    def __init__(self) -> None:
        self._kept: Hold | None = None

    def once(self, run: Callable[[], tuple[Tensor, Saved]]) -> tuple[Tensor, Saved]:
        """Run `run` the first time; the second time return what it returned then."""
        if self._kept is None:
            out, saved = run()
            self._kept = Hold(out.detach(), *saved)
        else:
            out, *saved = self._kept.take()
        return out.detach(), tuple(saved)
