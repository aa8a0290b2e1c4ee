"""Handover of a layer from a slice to the next one alone: states of a recurrence, tails of a convolution or of a window.

Keys and values grow with the sequence, and every later slice reads them (`attention.kv_cache`). What is handed over here has a
bounded size, and the next slice alone reads it, so its gradient is complete at once. It lives until the next slice's backward.

A layer has two nodes in a slice's graph. The one at its start brings in what the slice before has left, and its backward stores
the gradient; the one at its end, around the layer's output, brings that gradient in when the earlier slice runs backward. All
between is ordinary autograd, so hooks of data parallelism, recompute and counting need nothing of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.runtime.attention.segments import KVCacheError, SliceView, Tensors
from megatron_epp.runtime.autograd.handles import SavedHandle


class Boundary(NamedTuple):
    """Boundary between two slices of a sequence, in one layer; `token` is the first one behind it."""

    layer: int
    sequence: int
    token: int


@dataclass(slots=True)
class Handover:
    """States of one stage's layers at the boundaries of slices, and their gradients, in one iteration."""

    _states: dict[Boundary, Tensors] = field(default_factory=dict)
    _gradients: dict[Boundary, Tensors] = field(default_factory=dict)
    _to_recompute: dict[Boundary, SavedHandle] = field(default_factory=dict)
    _most_rows: dict[int, int] = field(default_factory=dict)

    @property
    def most_rows(self) -> int:
        """Rows of states behind long slices, if all have fewer behind short ones; else 0."""
        return max(self._most_rows.values(), default=0) if all(self._most_rows.values()) else 0

    @property
    def shorter_bytes(self) -> int:
        """Bytes that states which no slice has read yet would have in addition if slices were longer."""
        shorter = 0
        for boundary, state in self._states.items():
            for tensor in state:
                missing = max(0, self._most_rows.get(boundary.layer, 0) - len(tensor))
                shorter += missing * (tensor.nbytes // max(1, len(tensor)))
        return shorter

    @property
    def num_bytes(self) -> int:
        """Bytes of states that no slice has read yet, and of gradients that none has taken."""
        held = (tensor for part in (self._states, self._gradients) for tensors in part.values() for tensor in tensors)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def enter(self, layer: int, view: SliceView, *, forward_only: bool = False) -> Tensors:
        """Return what the slice before has handed over; nothing for a first slice. Raises `KVCacheError` if it has not run.

        A layer that recomputes runs first without gradients, and calls this again in its backward. What it read is kept for
        that by autograd, as a tensor of this slice, so that it is counted and offloaded with the others.
        """
        if view.start == 0:
            return ()
        boundary = Boundary(layer, view.sequence, view.start)
        if (handle := self._to_recompute.pop(boundary, None)) is not None:
            state = handle.take()
        elif (state := self._states.pop(boundary, ())) and not torch.is_grad_enabled() and not forward_only:
            self._to_recompute[boundary] = SavedHandle(*state)
        if not state:
            raise KVCacheError(
                f"layer {layer}, sequence {view.sequence}: the slice at token {view.start} finds no state of the one before it"
            )
        if not torch.is_grad_enabled():
            return state
        entered: Tensors = _Enter.apply(torch.empty(0, requires_grad=True), self, boundary, *state)
        return entered

    def leave(
        self, layer: int, view: SliceView, output: Tensor, state: Tensors, *, forward_only: bool = False, most_rows: int = 0
    ) -> Tensor:
        """Hand over the state at the end of a slice, and return the layer's output, through which its gradient comes.

        A recomputed forward leaves nothing: the next slice has run backward. Nor does a last slice. The output may be of a part
        behind the state: any tensor that gets a gradient in the slice's backward. `most_rows` are those of the state's tensors
        behind long slices, if short ones have fewer.
        """
        boundary = Boundary(layer, view.sequence, view.end)
        if view.is_last_slice:
            return output
        self._most_rows[layer] = most_rows
        if boundary not in self._gradients:
            self._states[boundary] = tuple(map(_alone, state))
        if not torch.is_grad_enabled() or forward_only:
            return output
        left: Tensor = _Leave.apply(output, self, boundary, *state)
        return left

    def assert_empty(self) -> None:
        """Raise `KVCacheError` if a state or a gradient outlived its iteration."""
        if left := {**self._states, **self._gradients, **self._to_recompute}:
            raise KVCacheError(f"states at {sorted(left)} were never taken")

    def store_gradient(self, boundary: Boundary, gradient: Tensors) -> None:
        self._gradients[boundary] = tuple(map(_alone, gradient))

    def take_gradient(self, boundary: Boundary) -> Tensors:
        """Return the gradient of a state. Raises `KVCacheError` if the next slice has not run backward."""
        if (gradient := self._gradients.pop(boundary, None)) is None:
            raise KVCacheError(
                f"layer {boundary.layer}, sequence {boundary.sequence}: the backward of the slice before token "
                f"{boundary.token} comes before that of the slice behind it"
            )
        return gradient


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, and without the memory of what it is a part of."""
    tensor = tensor.detach()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, handover: Handover, boundary: Boundary, *state: Tensor) -> Tensors:
        ctx.handover, ctx.boundary = handover, boundary
        return tuple(tensor.view_as(tensor) for tensor in state)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, ...]:
        ctx.handover.store_gradient(ctx.boundary, gradient)
        return (None, None, None, *[None] * len(gradient))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, handover: Handover, boundary: Boundary, *state: Tensor) -> Tensor:
        ctx.handover, ctx.boundary = handover, boundary
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, None, None, *ctx.handover.take_gradient(ctx.boundary))
