"""Tensors on the edge of a stage's graphs: its input, what is saved outside of a layer's graph, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.saved import resize


class ReceiveLeaf:
    """Input of a stage, received from the previous stage, as the start of an autograd graph.

    A leaf of autograd's own would hold the tensor until its gradient is computed. Here only autograd keeps it, as long as it
    needs it. `gradient` is None until the backward.
    """

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        entered: Tensor = _Enter.apply(torch.empty(0, requires_grad=True), hidden, self)
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, leaf: ReceiveLeaf) -> Tensor:
        ctx.leaf = leaf
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.leaf.gradient = grad
        return None, None, None


class SavedHandle:
    """Holder of tensors, in a graph node of their own, until they are taken.

    Autograd saves them, so hooks that count or offload saved tensors apply to them too.
    """

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


class CachedAttentionOutput:
    """Attention output of one layer for a chunk that is recomputed without its attention: kept by the first forward."""

    def __init__(self) -> None:
        self._handle: SavedHandle | None = None

    def once(self, run: Callable[[], tuple[Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run `run`, which returns the output and what backward needs; the second time return what it returned before."""
        if self._handle is None:
            out, saved = run()
            self._handle = SavedHandle(out.detach(), *saved)
            return out.detach(), saved
        out, *rest = self._handle.take()
        return out.detach(), tuple(rest)


class Discarded:
    """Output of `run` whose memory is freed after its last use in forward and recomputed before its first use in backward.

    For tensors that are cheap to compute and large to keep, such as a norm's output, which the linear layer after it saves. The
    storage of the saved tensor is resized to zero and filled again, so the graph is unchanged and gradients are bitwise the
    same. `run` is deterministic; the output has a storage of its own, which only saved tensors may need once `until` is called.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], x: Tensor, output: Tensor) -> None:
        self._run, self._input = run, SavedHandle(x)
        self._memory = output.untyped_storage()

    def until(self, result: Tensor) -> None:
        """Free the memory until the gradient of `result` is computed, which was made from the output."""
        resize(self._memory, 0)
        result.register_hook(self._fill)

    def _fill(self, _: Tensor) -> None:
        (x,) = self._input.take()
        with torch.no_grad():
            out = self._run(x)
        resize(self._memory, out.untyped_storage().nbytes())
        torch.empty(0, dtype=out.dtype, device=out.device).set_(self._memory, 0, out.shape, out.stride()).copy_(out)


# ---- gradient of a weight that is computed outside of autograd's graph, and reaches the weight through autograd ---------

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
