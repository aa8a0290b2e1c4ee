"""Rows of all tokens of a chunk, put together from those that it has computed itself and those of chunks that it borrows of."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from torch import Tensor

from megatron_epp.features.trees.tree_cache import TreeView
from megatron_epp.runtime.context import ChunkContext

_ROWS = -1
"""Number by which the cache keeps rows, in the place of a layer's."""


class _WholeRows(torch.autograd.Function):
    """Rows ``[tokens, 1, width]`` of the tokens of all sequences of a chunk, given those of its own. As keys and values are,
    they are kept for those that borrow them, whose gradients add up before the chunk's own backward.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ChunkContext) -> Tensor:
        assert isinstance(context.view, TreeView)
        ctx.context = context
        (whole,) = context.kv_cache.append(_ROWS, context.view, (own,))
        if context.forward_only:
            context.kv_cache.release(_ROWS, context.view)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (own,) = ctx.context.kv_cache.take_gradient(_ROWS, ctx.context.view, (grad,))
        return own, None


def whole_rows(hidden: Tensor, context: ChunkContext, is_divided: bool) -> Tensor:
    """Return hidden states of all tokens of a chunk's sequences, ``[tokens / shards, 1, hidden]``, given those of its own.

    With `is_divided`, tensor-parallel ranks have a part of the tokens each.
    """
    if not is_divided:
        return _WholeRows.apply(hidden, context)
    own = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return scatter_to_sequence_parallel_region(_WholeRows.apply(own, context))


def with_zeros(own: Tensor, context: ChunkContext) -> Tensor:
    """Return rows ``[tokens, 1, width]`` of all tokens of a chunk's sequences, zeros for those that it has not computed."""
    rows = own_tokens(context, own.device)
    return own.new_zeros(context.table.key_starts[-1], *own.shape[1:]).index_copy(0, rows, own)


def own_tokens(context: ChunkContext, device: torch.device) -> Tensor:
    """Return where the tokens that a chunk computes are among those of its sequences, int64 ``[tokens]``."""
    ends = [*accumulate(segment.end for segment in context.table.segments)]
    parts = [torch.arange(end - part.num_tokens, end) for end, part in zip(ends, context.table.segments, strict=True)]
    index = torch.cat(parts)
    return (index.pin_memory() if device.type == "cuda" else index).to(device, non_blocking=True)
