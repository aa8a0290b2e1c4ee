"""Gated delta rule over the sequences of a chunk: convolution and recurrence begin anew with each, and a slice goes on where
the one before it has ended (`handover`).

The layer is that of Gated Delta Networks (https://arxiv.org/abs/2412.06464): of every head it keeps a matrix ``[key channels,
value channels]`` in fp32, and of the convolution ahead of it the last rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_epp.runtime.attention.segments import Tensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Cut, Handover, Stretches, behind_tails, of_chunk, tails_of


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
        own, handover = of_chunk(context), context.kv_cache.carried(Handover)
        entered = handover.enter(self.number, context)
        rows = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        tails, ends = tails_of(own, {cut: state[:1] for cut, state in entered.items()}, (rows,), self._ahead)
        mixed = self._convolved(rows, tails, own)
        widths = [x.shape[1] * x.shape[2] for x in (q, k, v)]
        q, k, v = (part.unflatten(1, x.shape[1:]) for part, x in zip(mixed.split(widths, dim=1), (q, k, v), strict=True))
        if self.normalise is not None:
            q, k = self.normalise(q.contiguous()), self.normalise(k.contiguous())
        copies = v.shape[1] // q.shape[1]  # groups of value heads share a key head
        q, k = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (q, k))
        wide = torch.promote_types(decay.dtype, torch.float32)
        log_decay = -self.decay.exp() * functional.softplus(decay[..., 0].to(wide) + self.step)
        memories = {cut: memory for cut, (_, memory) in entered.items()}
        out = self._recurred((q, k, v), log_decay, strength[..., 0].sigmoid(), memories, own)
        return handover.leave(self.number, context, out, {cut: (*ends[cut], memories[cut]) for cut in own.left})

    @property
    def _ahead(self) -> int:
        """Tokens ahead of one that the convolution reads."""
        return self.filters.shape[-1] - 1

    def _convolved(self, rows: Tensor, tails: Mapping[int, Tensors], own: Stretches) -> Tensor:
        """Return the convolution of a chunk's rows, each stretch's behind the last ones ahead of it."""
        # These stand in front, and what comes out for them is dropped: kernels need to know of no state.
        table = own.table.within(self._ahead) if tails else own.table
        (seen,), ends = behind_tails(own, tails, (rows,)), table.key_starts if tails else table.query_starts
        if self.convolve is not None:
            offsets = table.cu_seqlens(rows.device)[bool(tails)]  # no copy from the host in every layer
            offsets = offsets.clone() if tails else offsets  # kept for backward, without those of the class of segments
            mixed = self.convolve(seen[None], self.filters[:, 0], self.bias, offsets)[0]
        else:
            mixed = torch.cat([self._one(seen[start:end]) for start, end in pairwise(ends)])
        if not tails:
            return mixed
        return torch.cat([mixed[end - each.num_tokens : end] for each, end in zip(table.segments, ends[1:], strict=True)])

    def _one(self, rows: Tensor) -> Tensor:
        """Convolve one sequence, ``[tokens, channels]``."""
        padded = functional.pad(rows.t()[None], (self._ahead, 0))
        return self.activation(functional.conv1d(padded, self.filters, self.bias, groups=len(self.filters)))[0].t()

    def _recurred(
        self, heads: Tensors, log_decay: Tensor, strength: Tensor, memories: dict[Cut, Tensor], own: Stretches
    ) -> Tensor:
        """Return the output of the recurrence. States at cuts are added to those with which the chunk begins."""
        table, starts, takes_offsets = own.table, own.table.query_starts, self.convolve is not None
        columns = [x[None].contiguous() for x in (*heads, log_decay, strength)]

        def run(start: int, end: int, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
            q, k, v, g, beta = (x[:, start:end] for x in columns)
            options = {"initial_state": state, "output_final_state": False} | options
            out, last = self.rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False, **options)
            return out[0], last

        def whole(first: int, stop: int) -> Iterator[Tensor]:
            if takes_offsets and (stop - first > 1 or not own.parts):
                offsets = table.cu_seqlens(log_decay.device)[0][first : stop + 1]
                yield run(starts[first], starts[stop], cu_seqlens=offsets - starts[first] if first else offsets)[0]
            else:
                yield from (run(*ends)[0] for ends in pairwise(starts[first : stop + 1]))

        outs, done = list[Tensor](), 0
        for number, before, behind in own.parts:  # alone, since a state of every sequence would be in memory otherwise
            outs += whole(done, number)
            state, done = None if before is None else memories[before], number + 1
            out, last = run(starts[number], starts[done], state, output_final_state=behind is not None)
            outs.append(out)
            if behind is not None and last is not None:
                memories[behind] = last
        outs += whole(done, len(table.segments))
        return torch.cat(outs) if len(outs) > 1 else outs[0]
