"""Gated delta rule over the sequences of a chunk: convolution and recurrence begin anew with each, and a slice goes on where
the one before it has ended (`handover`).

The layer is that of Gated Delta Networks (https://arxiv.org/abs/2412.06464): of every head it keeps a matrix ``[key channels,
value channels]`` in fp32, and of the convolution ahead of it the last rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_epp.runtime.attention.segments import Tensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """A layer's weights for the heads that a rank has, and its kernels."""

    number: int  # of the layer, unique in its stage
    filters: Tensor  # of the convolution, ``[channels, 1, width]``: all queries' channels, then keys' and values'
    bias: Tensor | None  # of the convolution, ``[channels]``; None without
    decay: Tensor  # logarithms of the heads' decays ``[value heads]``
    step: Tensor  # bias of the gate of the decay ``[value heads]``
    # Kernel of the gated delta rule, as flash-linear-attention has it: of ``[1, tokens, heads, channels]`` each
    rule: Callable[..., tuple[Tensor, Tensor | None]]
    # Scales the channels of queries and keys, in place of a softmax's temperature; None leaves them as they are
    normalise: Callable[[Tensor], Tensor] | None
    # Kernel of the convolution with its activation, for packed sequences ``[1, tokens, channels]``; None for torch's, where
    # convolution and recurrence run sequence by sequence
    convolve: Callable[..., Tensor] | None
    activation: Callable[[Tensor], Tensor]  # of the convolution's output, where torch's runs

    def __call__(self, q: Tensor, rest: Tensors, context: ChunkContext) -> Tensor:
        """Return the output of a chunk's tokens, ``[tokens, value heads, channels]``.

        Args:
            q: queries ``[tokens, key heads, channels]``, ahead of the convolution.
            rest: keys, shaped as these; values ``[tokens, value heads, channels]``; and the inputs of the gates of the write
                strength and of the decay, ``[tokens, value heads, 1]`` each.
        """
        k, v, strength, decay = rest
        view, handover = context.view, context.kv_cache.carried(Handover)
        state = () if view is None else handover.enter(self.number, view, forward_only=context.forward_only)
        tail, memory = state or (None, None)
        rows = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        mixed, tails = self._convolved(rows, tail, context)
        widths = [x.shape[1] * x.shape[2] for x in (q, k, v)]
        q, k, v = (part.unflatten(1, x.shape[1:]) for part, x in zip(mixed.split(widths, dim=1), (q, k, v), strict=True))
        if self.normalise is not None:
            q, k = self.normalise(q.contiguous()), self.normalise(k.contiguous())
        copies = v.shape[1] // q.shape[1]  # groups of value heads share a key head
        q, k = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (q, k))
        wide = torch.promote_types(decay.dtype, torch.float32)
        log_decay = -self.decay.exp() * functional.softplus(decay[..., 0].to(wide) + self.step)
        out, memories = self._recurred((q, k, v), log_decay, strength[..., 0].sigmoid(), memory, context)
        for left, of in ((view, 0), (context.begun, context.table.num_sequences - 1)):
            if left is not None and not left.is_last_slice:
                state = tails(of), memories[of]
                out = handover.leave(self.number, left, out, state, forward_only=context.forward_only)
        return out

    def _convolved(self, rows: Tensor, tail: Tensor | None, context: ChunkContext) -> tuple[Tensor, Callable[[int], Tensor]]:
        """Return the convolution of a chunk's rows behind the last ones of the slice before, and a function that returns the
        last rows of one of its segments, which stand ahead of the next slice's.
        """
        ahead, starts = self.filters.shape[-1] - 1, context.table.query_starts
        # The tail stands in front of the slice, and what comes out for it is dropped: kernels need to know of no state.
        held = 0 if tail is None else ahead
        rows = rows if tail is None else torch.cat([tail, rows])
        ends = [0, *(end + held for end in starts[1:])]

        def tail_of(number: int) -> Tensor:
            own = rows[max(ends[number], ends[number + 1] - ahead) : ends[number + 1]]
            return functional.pad(own, (0, 0, ahead - len(own), 0))

        if self.convolve is not None:
            offsets = context.table.cu_seqlens(rows.device)[0]  # no copy from the host in every layer
            if held:
                offsets = torch.cat([offsets[:1], offsets[1:] + held])
            mixed = self.convolve(rows[None], self.filters[:, 0], self.bias, offsets)[0]
        else:
            mixed = torch.cat([self._one(rows[start:end], ahead) for start, end in pairwise(ends)])
        return mixed[held:], tail_of

    def _one(self, rows: Tensor, ahead: int) -> Tensor:
        """Convolve one sequence, ``[tokens, channels]``."""
        padded = functional.pad(rows.t()[None], (ahead, 0))
        out = functional.conv1d(padded, self.filters, self.bias, groups=len(self.filters))
        return self.activation(out)[0].t()

    def _recurred(
        self, heads: Tensors, log_decay: Tensor, strength: Tensor, memory: Tensor | None, context: ChunkContext
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the output of the recurrence, and the states behind the chunk's segments whose sequences go on."""
        table, view, begun = context.table, context.view, context.begun
        starts, takes_offsets = table.query_starts, self.convolve is not None
        columns = [x[None].contiguous() for x in (*heads, log_decay, strength)]

        def run(start: int, end: int, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
            q, k, v, g, beta = (x[:, start:end] for x in columns)
            options = {"initial_state": state, "output_final_state": False} | options
            out, last = self.rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False, **options)
            return out[0], last

        def whole(first: int, stop: int) -> Iterator[Tensor]:
            if takes_offsets and (stop - first > 1 or view is None):
                offsets = table.cu_seqlens(log_decay.device)[0][first : stop + 1]
                yield run(starts[first], starts[stop], cu_seqlens=offsets - starts[first] if first else offsets)[0]
            else:
                yield from (run(*ends)[0] for ends in pairwise(starts[first : stop + 1]))

        # Alone, since a state of every sequence would be in memory otherwise.
        alone = ((0, view, memory), (table.num_sequences - 1, begun, None))
        outs, memories, done = list[Tensor](), dict[int, Tensor](), 0
        for number, part, state in alone:
            if part is not None:
                outs += whole(done, number)
                out, last = run(starts[number], starts[number + 1], state, output_final_state=not part.is_last_slice)
                outs.append(out)
                memories |= {} if last is None else {number: last}
                done = number + 1
        outs += whole(done, len(table.segments))
        return torch.cat(outs) if len(outs) > 1 else outs[0], memories
