"""Weight gradients apart from input gradients: a linear layer's is taken with its backward, or later, chunk by chunk.

The layer's output is computed without an edge to its weight. Backward makes of the output's gradient and the layer's input a
graph of one node: the weight's gradient. That graph is run at once, or kept until `WeightGradients.run`. Either way the
gradient reaches the weight as any other does, through autograd, so whatever hooks hang on the weight (Megatron's data
parallelism) see what they always see. What is kept is held as tensors saved by autograd, so whoever counts or moves those
counts or moves it too.

A layer that puts off its weight gradient by itself hands over what it would compute it from, and a function that does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.hold import Hold

Product = Callable[[Tensor, Tensor], Tensor]
"""From what a layer kept of its input and its output's gradient to its weight's gradient."""


class Linear(NamedTuple):
    """A linear layer's weight, and what makes its gradient."""

    weight: Tensor
    product: Product


class Kept(NamedTuple):
    """A weight's gradient that is still to be computed."""

    weight: Tensor
    node: Tensor

    def run(self) -> None:
        """Compute the gradient and hand it to the weight. What it needed is free afterwards."""
        torch.autograd.backward(self.node, torch.zeros_like(self.node))


class PutOff(NamedTuple):
    """A weight's gradient that its layer has put off, and what `compute` takes."""

    weight: Tensor
    held: Hold
    compute: Callable[[Sequence[Tensor]], None]

    def run(self) -> None:
        """Have the layer compute it."""
        self.compute(self.held.take())


class WeightGradients:
    """The weight gradients of one stage."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Kept | PutOff]] = {}
        self._due: list[PutOff] = []
        self._chunk: int | None = None

    @contextmanager
    def keeping(self, chunk: int) -> Iterator[None]:
        """While a chunk's backward runs: keep its weight gradients instead of computing them."""
        self._chunk, self._kept[chunk] = chunk, []
        try:
            yield
        finally:
            self._chunk = None

    def pop(self, chunk: int) -> list[Kept | PutOff]:
        """What was kept of a chunk, in the order of its backward. Raises `EppError` when its backward has not run."""
        if chunk not in self._kept:
            raise EppError(f"weight gradient of chunk {chunk}: its backward has kept none")
        return self._kept.pop(chunk)

    def run(self, chunk: int) -> None:
        """Compute what was kept of a chunk, freeing it layer by layer."""
        kept = self.pop(chunk)
        while kept:
            kept.pop(0).run()

    def clear(self) -> None:
        """Drop all that was kept."""
        self._kept.clear()
        self._due.clear()

    def linear(self, x: Tensor, kept: Tensor, layer: Linear) -> Tensor:
        """``x @ weight.t()``, without an edge to the weight.

        Args:
            x: ``[..., in]``. Requires a gradient.
            kept: what of it `layer.product` asks for; often `x` itself.
            layer: the weight ``[out, in]`` and its gradient.
        """
        return _Linear.apply(x, kept, layer, self)

    def put_off(self, weight: Tensor, tensors: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], None]) -> None:
        """A layer has put off its weight's gradient. Where it is not kept it is computed when the next one comes, or in
        `finish`: not at once, for autograd is still busy with this weight.

        Args:
            weight: of the layer.
            tensors: what `compute` is to be given; not to be referred to by itself.
            compute: computes the gradient and hands it to the weight.
        """
        one = PutOff(weight, Hold(*(tensor.data for tensor in tensors)), compute)
        if self._chunk is None:
            self.finish()
            self._due.append(one)
        else:
            self._kept[self._chunk].append(one)

    def finish(self) -> None:
        """A backward has ended: compute what it put off and did not keep."""
        while self._due:
            self._due.pop().run()

    def take(self, x: Tensor, grad: Tensor, layer: Linear) -> None:
        """A layer's input and its output's gradient are there."""
        with torch.enable_grad():
            kept = Kept(layer.weight, _Gradient.apply(layer.weight, x, grad, layer.product))
        if self._chunk is None:
            kept.run()
        else:
            self._kept[self._chunk].append(kept)


class _Linear(torch.autograd.Function):
    """The weight comes inside `layer`, not as a tensor of its own: an edge to it would fire its hooks without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, layer: Linear, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.layer, ctx.gradients = layer, gradients
        return x.matmul(layer.weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        # Without its history: some backwards (Megatron's cross entropy) build their result in place of a forward's tensor.
        ctx.gradients.take(kept.detach(), grad.detach(), ctx.layer)
        return grad.matmul(ctx.layer.weight), None, None, None


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, grad: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x, grad)
        ctx.product = product
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.product(*ctx.saved_tensors), None, None, None
