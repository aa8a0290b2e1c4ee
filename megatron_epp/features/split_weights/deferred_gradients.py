"""Weight gradients split from input gradients: computed with a linear layer's backward, or deferred, chunk by chunk.

The layer's output is computed without an edge to its weight. Backward builds, from the output's gradient and the layer's input,
a graph of one node, the weight's gradient, which is run at once, or kept until `WeightGradients.run`. Either way the gradient
reaches the weight through autograd, so hooks on the weight (Megatron's data parallelism) run as usual, and so do hooks that
count or offload saved tensors. A layer that defers its weight gradient by itself passes the tensors it is computed from, and a
function that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.attributes import having
from megatron_epp.runtime.autograd.handles import Product, SavedHandle, gradient_node
from megatron_epp.runtime.executor import Executor, Handler


class Linear(NamedTuple):
    weight: Tensor
    product: Product


class DeferredGradient(NamedTuple):
    weight: Tensor
    run: Callable[[], None]


after_each: Callable[[], None] | None = None
"""Called after each deferred gradient, where another action runs between two of them."""


class WeightGradients:
    """Weight gradients of one stage, run by a plan (`in_plan`) or by its program, whose own calls keep edges to weights."""

    in_plan = False
    kept: Container[int] = ()
    """Chunks whose backwards leave their weight gradients to `run`."""
    timed: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that times `run`."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[DeferredGradient]] = {}
        self._due: list[DeferredGradient] = []
        self._chunk: int | None = None

    @contextmanager
    def keeping(self, chunk: int) -> Iterator[None]:
        """Defer the weight gradients of a chunk, whose backward runs in the body, instead of computing them."""
        self._deferred[chunk] = []
        with having(self, _chunk=chunk):
            yield

    @contextmanager
    def backward_of(self, chunk: int) -> Iterator[None]:
        """Compute the weight gradients of a chunk, whose backward runs in the body, with it, or keep them for `run`."""
        with self.keeping(chunk) if chunk in self.kept else nullcontext():
            yield
            self.finish()

    def pop(self, chunk: int) -> list[DeferredGradient]:
        """Return the deferred gradients of a chunk, in the order of its backward. Raises `EppError` if that has not run."""
        if chunk not in self._deferred:
            raise EppError(f"the backward of chunk {chunk} has deferred no weight gradient")
        return self._deferred.pop(chunk)

    def run(self, chunk: int) -> None:
        """Compute the deferred gradients of a chunk, freeing their tensors layer by layer."""
        deferred = self.pop(chunk)
        with self.timed():
            while deferred:
                deferred.pop(0).run()
                if after_each is not None:
                    after_each()

    def linear(self, x: Tensor, saved_x: Tensor, layer: Linear) -> Tensor:
        """Return ``x @ weight.t()``, without an edge to the weight.

        `x` is ``[..., in]`` and requires a gradient; `saved_x` is the part of it that `layer.product` needs, often `x` itself.
        """
        return _Linear.apply(x, saved_x, layer, self)

    def put_off(self, weight: Tensor, tensors: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], None]) -> None:
        """Register the gradient of a layer's weight, which `compute` will compute from the tensors and pass to the weight.

        Outside `keeping`, it is computed when the next one is registered, or in `finish`: not at once, because autograd is
        still processing this weight. `compute` must not hold references to the tensors itself.
        """
        held = SavedHandle(*(tensor.data for tensor in tensors))
        deferred = DeferredGradient(weight, lambda: compute(held.take()))
        if self._chunk is None:
            self.finish()
            self._due.append(deferred)
        else:
            self._deferred[self._chunk].append(deferred)

    def finish(self) -> None:
        """Compute the deferred gradients that are not kept. Called at the end of a backward."""
        while self._due:
            self._due.pop().run()

    def take(self, x: Tensor, grad: Tensor, layer: Linear) -> None:
        node = gradient_node(layer.weight, x, grad, layer.product)
        deferred = DeferredGradient(layer.weight, lambda: torch.autograd.backward(node, torch.zeros_like(node)))
        if self._chunk is None:
            deferred.run()
        else:
            self._deferred[self._chunk].append(deferred)


def handlers(plan: Plan, stages: Mapping[int, Any]) -> dict[Op, Handler]:
    """Return what runs a plan's weight gradients on stages with `weights`, whose backwards leave them from now on."""
    for number, stage in stages.items():
        own = (action for step in plan.ranks[plan.placement[number]] for action in step.actions)
        stage.weights.kept = {action.chunk for action in own if action.op is Op.W and action.stage == number}
    return {Op.W: compute}


def compute(run: Executor, action: Action) -> None:
    """Compute the weight gradients that the backward of a chunk has left."""
    run.announce_last_gradient(action)
    with run.recorder.action(action):
        if run.differentiates(action.stage):
            stage: Any = run.stages[action.stage]
            stage.weights.run(action.chunk)


class _Linear(torch.autograd.Function):
    """Linear layer without an edge to its weight.

    The weight is passed inside `layer`, not as a tensor argument: an edge to it would fire its hooks without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved_x: Tensor, layer: Linear, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(saved_x)
        ctx.layer, ctx.gradients = layer, gradients
        return x.matmul(layer.weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved_x,) = ctx.saved_tensors
        # Without its history: some backwards (Megatron's cross entropy) build their result in place of a forward's tensor.
        ctx.gradients.take(saved_x.detach(), grad.detach(), ctx.layer)
        return grad.matmul(ctx.layer.weight), None, None, None
