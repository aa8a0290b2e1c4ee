"""Handover of a layer from a slice to the next one alone: states of a recurrence, tails of a convolution or of a window.

Keys and values grow with the sequence, and every later slice reads them (`attention.kv_cache`). What is handed over here has a
bounded size, and those alone read it that go on where the slice ends: the next one, and of other sequences that share the
prefix the first. Its gradient is complete when these have run backward.

A layer has two nodes in a slice's graph. The one at its start brings in what the slice before has left, and its backward stores
the gradient; the one at its end, around the layer's output, brings that gradient in when the earlier slice runs backward. All
between is ordinary autograd, so hooks of data parallelism, recompute and counting need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.runtime.attention.segments import KVCacheError, SegmentTable, SliceView, Tensors
from megatron_epp.runtime.autograd.handles import SavedHandle
from megatron_epp.runtime.context import ChunkContext

type Cut = tuple[int, int]
"""Position at which a sequence, or one that borrows from it, is cut: the sequence, and its first token behind the cut."""


class Stretch(NamedTuple):
    """A segment of a chunk that begins with a state, or whose last state others begin with."""

    number: int  # of the segment in the chunk's table
    before: Cut | None  # the state with which it begins; None at the beginning of a sequence
    behind: Cut | None  # the state that it leaves; None where no stretch begins with it


@dataclass(frozen=True, slots=True)
class Stretches:
    """A chunk as layers that hand on a state run it, where that is another one than the last keys and values."""

    table: SegmentTable  # of the chunk's tokens, with segments cut where others begin with their states
    parts: tuple[Stretch, ...] = ()  # each behind the one that it goes on from; other segments are whole sequences
    entered: tuple[Cut, ...] = ()  # with which parts begin, and behind which another chunk ends
    left: Mapping[Cut, int] = field(default_factory=dict)  # for so many other chunks each


def of_chunk(context: ChunkContext) -> Stretches:
    return stretches_of(context.table, context.view, context.begun)


def stretches_of(table: SegmentTable, view: SliceView | None, begun: SliceView | None) -> Stretches:
    """Return a chunk as layers that hand on a state run it, from its layout (`ChunkContext`)."""
    if view is None:
        return Stretches(table)
    if view.handed is not None:
        return view.handed
    parts = tuple(
        Stretch(at, (v.sequence, v.start) if v.start else None, None if v.is_last_slice else (v.sequence, v.end))
        for at, v in ((0, view), (table.num_sequences - 1, begun))
        if v is not None
    )
    entered = tuple(part.before for part in parts if part.before is not None)
    return Stretches(table, parts, entered, {part.behind: 1 for part in parts if part.behind is not None})


class Boundary(NamedTuple):
    """Boundary between a slice and those that go on there, in one layer; `token` is the first one behind it."""

    layer: int
    sequence: int
    token: int


@dataclass(slots=True)
class Handover:
    """States of one stage's layers at the boundaries of slices, and their gradients, in one iteration."""

    _states: dict[Boundary, tuple[Tensors, int]] = field(default_factory=dict)  # with the chunks that have not read them
    _gradients: dict[Boundary, tuple[Tensors, int]] = field(default_factory=dict)  # with the chunks whose gradient is in it
    _to_recompute: dict[tuple[Boundary, int], SavedHandle] = field(default_factory=dict)  # by the chunk that reads it again
    _most_rows: dict[int, int] = field(default_factory=dict)

    @property
    def most_rows(self) -> int:
        """Rows of states behind long slices, if all have fewer behind short ones; else 0."""
        return max(self._most_rows.values(), default=0) if all(self._most_rows.values()) else 0

    @property
    def shorter_bytes(self) -> int:
        """Bytes that states which no slice has read yet would have in addition if slices were longer."""
        shorter = 0
        for boundary, (state, _) in self._states.items():
            for tensor in state:
                missing = max(0, self._most_rows.get(boundary.layer, 0) - len(tensor))
                shorter += missing * (tensor.nbytes // max(1, len(tensor)))
        return shorter

    @property
    def num_bytes(self) -> int:
        """Bytes of states that a chunk has not read yet, and of gradients that none has taken."""
        held = (tensor for part in (self._states, self._gradients) for tensors, _ in part.values() for tensor in tensors)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def enter(self, layer: int, context: ChunkContext) -> dict[Cut, Tensors]:
        """Return the states with which a chunk begins. Raises `KVCacheError` if a chunk that leaves one has not run.

        A layer that recomputes runs first without gradients, and calls this again in its backward. What it read is kept for
        that by autograd, as a tensor of this chunk, so that it is counted and offloaded with the others.
        """
        return {cut: self._enter(Boundary(layer, *cut), context) for cut in of_chunk(context).entered}

    def _enter(self, boundary: Boundary, context: ChunkContext) -> Tensors:
        if (handle := self._to_recompute.pop((boundary, context.chunk), None)) is not None:
            state = handle.take()
        else:
            state, left = self._states.pop(boundary, ((), 0))
            if left > 1:
                self._states[boundary] = state, left - 1
            if state and not torch.is_grad_enabled() and not context.forward_only:
                self._to_recompute[boundary, context.chunk] = SavedHandle(*state)
        if not state:
            raise KVCacheError(
                f"layer {boundary.layer}, sequence {boundary.sequence}: the slice at token {boundary.token} finds no state of "
                "the one before it"
            )
        if not torch.is_grad_enabled():
            return state
        entered: Tensors = _Enter.apply(torch.empty(0, requires_grad=True), self, boundary, *state)
        return entered

    def leave(
        self, layer: int, context: ChunkContext, output: Tensor, states: Mapping[Cut, Tensors], *, most_rows: int = 0
    ) -> Tensor:
        """Hand over a chunk's states for others, and return the layer's output, through which their gradients come.

        A recomputed forward leaves nothing: those behind it have run backward. The output is any tensor that gets a gradient in
        the chunk's backward. `most_rows` are those of states' tensors behind long slices, if short ones have fewer.
        """
        for cut, readers in of_chunk(context).left.items():
            boundary = Boundary(layer, *cut)
            self._most_rows[layer] = most_rows
            if boundary not in self._gradients:
                self._states[boundary] = tuple(map(_alone, states[cut])), readers
            if torch.is_grad_enabled() and not context.forward_only:
                output = _Leave.apply(output, self, boundary, readers, *states[cut])
        return output

    def assert_empty(self) -> None:
        """Raise `KVCacheError` if a state or a gradient outlived its iteration."""
        if left := [*self._states, *self._gradients, *(boundary for boundary, _ in self._to_recompute)]:
            raise KVCacheError(f"states at {sorted(left)} were never taken")

    def add_gradient(self, boundary: Boundary, gradient: Tensors) -> None:
        """Add a chunk's gradient of a state. Sums of several are of 32 bits at least."""
        total, count = self._gradients.get(boundary, ((), 0))
        pairs = zip(total, gradient, strict=True) if total else ()
        wide = tuple(own.to(torch.promote_types(own.dtype, torch.float32)) + more for own, more in pairs)
        self._gradients[boundary] = wide or tuple(map(_alone, gradient)), count + 1

    def take_gradient(self, boundary: Boundary, readers: int) -> Tensors:
        """Return the gradient of a state. Raises `KVCacheError` if a chunk that begins with it has not run backward."""
        gradient, count = self._gradients.pop(boundary, ((), 0))
        if count < readers:
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
        ctx.handover.add_gradient(ctx.boundary, gradient)
        return (None, None, None, *[None] * len(gradient))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, handover: Handover, boundary: Boundary, readers: int, *state: Tensor) -> Tensor:
        ctx.handover, ctx.boundary, ctx.readers = handover, boundary, readers
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, None, None, None, *ctx.handover.take_gradient(ctx.boundary, ctx.readers))


def tails_of(
    stretches: Stretches, entered: Mapping[Cut, Tensors], rows: Tensors, count: int
) -> tuple[dict[int, Tensors], dict[Cut, Tensors]]:
    """Return the last `count` rows ahead of each stretch that is not its sequence's first, by its number in the table, and
    those up to each cut, where the chunk begins with those that `entered`.
    """
    starts, known, tails = stretches.table.query_starts, {**entered}, dict[int, Tensors]()
    for number, before, behind in stretches.parts:
        if before is not None:
            tails[number] = known[before]
        if behind is not None:
            own = tuple(x[max(starts[number], starts[number + 1] - count) : starts[number + 1]] for x in rows)
            if number in tails and len(own[0]) < count:
                own = tuple(torch.cat(pair)[-count:] for pair in zip(tails[number], own, strict=True))
            known[behind] = own
    return tails, known


def behind_tails(stretches: Stretches, tails: Mapping[int, Tensors], rows: Tensors) -> Tensors:
    """Return a chunk's rows, with those ahead of each stretch in front of its own."""
    pieces, done = list[Tensors](), 0
    for number, tail in tails.items():
        at = stretches.table.query_starts[number]
        pieces += tuple(x[done:at] for x in rows), tail
        done = at
    pieces.append(tuple(x[done:] for x in rows))
    return tuple(map(torch.cat, zip(*pieces, strict=True))) if tails else rows
