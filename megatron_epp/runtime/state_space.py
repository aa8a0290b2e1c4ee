"""Mamba-2 over the sequences of a chunk: convolution and recurrence begin anew with each, and a slice goes on where the one
before it has ended (`handover`).

The layer is that of Mamba-2 (https://arxiv.org/abs/2405.21060): of every head it keeps a matrix ``[channels, state]`` in fp32,
and of the convolution ahead of it the last rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover, behind_tails, of_chunk, tails_of

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
        own, handover = of_chunk(context), context.kv_cache.carried(Handover)
        entered = handover.enter(self.number, context)
        mixed = rows[:, self.gate_width : self.gate_width + self.mixed_width]
        tails, ends = tails_of(own, {cut: state[:1] for cut, state in entered.items()}, (mixed,), self.filter_width - 1)
        # Kernels have no state of the convolution, so the rows that it looks back to stand in front, for no output. All rows
        # are copied, if any are: a view of the chunk's would keep all of these, too.
        ahead = {number: len(tail) for number, (tail,) in tails.items()}
        in_front = {number: (self._without_step(tail, rows),) for number, (tail,) in tails.items()}
        (rows,) = behind_tails(own, in_front, (rows,))
        sizes = (segment.num_tokens + ahead.get(number, 0) for number, segment in enumerate(own.table.segments))
        starts = [*accumulate(sizes, initial=0)]
        states, outs, done = {cut: state for cut, (_, state) in entered.items()}, list[Tensor](), 0
        for number, before, behind in own.parts:
            if number > done:  # company has no state that enters or leaves
                outs.append(self._packed(rows[starts[done] : starts[number]], own.table, done, number))
            stretch, done = rows[starts[number] : starts[number + 1]], number + 1
            state, is_followed = None if before is None else states[before], behind is not None
            out = self.scan(stretch[None], initial_states=state, return_final_states=is_followed)
            if behind is not None:
                out, states[behind] = out
            outs.append(out[0, ahead.get(number, 0) :])
        if len(own.table.segments) > done:
            outs.append(self._packed(rows[starts[done] :], own.table, done, len(own.table.segments)))
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return handover.leave(self.number, context, out, {cut: (*ends[cut], states[cut]) for cut in own.left})

    def _without_step(self, tail: Tensor, rows: Tensor) -> Tensor:
        """Return rows that only the convolution sees."""
        steps = rows.shape[1] - self.gate_width - self.mixed_width
        ends = tail.new_zeros(len(tail), self.gate_width), tail.new_full((len(tail), steps), _NO_STEP)
        return torch.cat([ends[0], tail, ends[1]], dim=1)

    def _packed(self, rows: Tensor, table: SegmentTable, first: int, stop: int) -> Tensor:
        """Return the output of the chunk's segments ``[first, stop)``, of which `rows` are."""
        named = {"seq_idx": table.numbers(rows.device, first)[None, : len(rows)]} if stop - first > 1 else {}
        out: Tensor = self.scan(rows[None], **named)
        return out[0]
