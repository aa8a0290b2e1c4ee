"""Mamba-2 over the sequences of a chunk: convolution and recurrence begin anew with each, and a slice goes on where the one
before it has ended (`handover`).

The layer is that of Mamba-2 (https://arxiv.org/abs/2405.21060): of every head it keeps a matrix ``[channels, state]`` in fp32,
and of the convolution ahead of it the last rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_epp.runtime.attention.segments import SliceView, Tensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover

_NO_STEP = -1e4
"""Input of softplus, whatever its bias, for a step of 0: such a row neither feeds the state nor lets it decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceLayer:
    """A layer's kernel with its weights, for the heads that a rank has."""

    number: int  # of the layer, unique in its stage
    # Kernel of convolution, recurrence and gate, as mamba-ssm has it: from ``[1, tokens, columns]``, and perhaps a state, to
    # ``[1, tokens, heads * channels]``, and the last state if it is asked for one
    scan: Callable[..., Any]
    gate_width: int  # columns of a row that the gate takes, the first ones
    mixed_width: int  # columns that the convolution reads, the next ones; those of the steps come last, one of each head
    filter_width: int  # tokens that the convolution sees

    def __call__(self, rows: Tensor, context: ChunkContext) -> Tensor:
        """Return the output ``[tokens, heads * channels]`` of a chunk's tokens, of which rows are ``[tokens, columns]``."""
        view, handover, starts = context.view, context.kv_cache.carried(Handover), context.table.query_starts
        if view is None:
            return self._packed(rows, context, 0, len(context.table.segments))
        tail, state = handover.enter(self.number, view, forward_only=context.forward_only) or (None, None)
        held = 0 if tail is None else len(tail)
        # Kernels have no state of the convolution, so the rows that it looks back to stand in front; their output is dropped.
        rows = rows if tail is None else torch.cat([self._without_step(tail, rows), rows])
        outs, left, done, table = list[Tensor](), list[tuple[SliceView, Tensors]](), 0, context.table
        begun = [] if context.begun is None else [(table.num_sequences - 1, context.begun)]
        for number, own_view in ((0, view), *begun):
            if number > done:  # company has no state that enters or leaves
                outs.append(self._packed(rows[starts[done] + held : starts[number] + held], context, done, number))
            own = rows[starts[number] + held * (number > 0) : starts[number + 1] + held]
            out, last = self._alone(own, None if number else state, is_followed=not own_view.is_last_slice)
            outs.append(out if number else out[held:])
            if last is not None:  # another slice follows
                mixed, ahead = own[:, self.gate_width : self.gate_width + self.mixed_width], self.filter_width - 1
                left.append((own_view, (functional.pad(mixed, (0, 0, max(0, ahead - len(own)), 0))[-ahead:], last)))
            done = number + 1
        if len(table.segments) > done:
            outs.append(self._packed(rows[starts[done] + held :], context, done, len(table.segments)))
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        for own_view, handed in left:
            out = handover.leave(self.number, own_view, out, handed, forward_only=context.forward_only)
        return out

    def _without_step(self, tail: Tensor, rows: Tensor) -> Tensor:
        """Return rows that only the convolution sees."""
        steps = rows.shape[1] - self.gate_width - self.mixed_width
        ends = tail.new_zeros(len(tail), self.gate_width), tail.new_full((len(tail), steps), _NO_STEP)
        return torch.cat([ends[0], tail, ends[1]], dim=1)

    def _alone(self, rows: Tensor, state: Tensor | None, is_followed: bool) -> tuple[Tensor, Tensor | None]:
        out = self.scan(rows[None], initial_states=state, return_final_states=is_followed)
        return (out[0][0], out[1]) if is_followed else (out[0], None)

    def _packed(self, rows: Tensor, context: ChunkContext, first: int, stop: int) -> Tensor:
        """Return the output of the chunk's segments ``[first, stop)``, of which `rows` are."""
        several = stop - first > 1
        named = {"seq_idx": context.table.numbers(rows.device, first)[None, : len(rows)]} if several else {}
        out: Tensor = self.scan(rows[None], **named)
        return out[0]
