"""Attention of one chunk in a layer that sees a window of earlier tokens: a slice hands the rows in it on to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel
from megatron_epp.runtime.attention.core import ChunkAttention
from megatron_epp.runtime.attention.segments import Tensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover


def window_attention(
    q: Tensor,
    cached: Sequence[Tensor],
    context: ChunkContext,
    layer: int,
    scale: float,
    context_parallel: ContextParallel = NOT_SHARED,
    preference: str = "auto",
    sinks: Tensor | None = None,
    *,
    window: int,
) -> Tensor:
    """`core.chunk_attention`, in which a token sees itself and `window` tokens ahead of it. No other rows are cached."""
    view, handover, key = context.view, context.kv_cache.carried(Handover), -1 - layer  # others hand on by numbers from 0
    own_sinks = None if sinks is None else context_parallel.own_heads(sinks, cached[0].shape[1])
    alone = replace(context, table=context.table.within(window), view=None, begun=None)

    def attend(q: Tensor, cached: Tensors) -> Tensor:
        """Attend to a slice's own keys and values behind the last ones of the slice before."""
        tail = () if view is None else handover.enter(key, view, forward_only=context.forward_only)
        rows = tuple(torch.cat(pair) for pair in zip(tail, cached, strict=True)) if tail else cached
        out: Tensor = ChunkAttention.apply(q, alone, layer, scale, preference, own_sinks, *rows)
        if view is None:
            return out
        end = rows[0].shape[0] - cached[0].shape[0] + view.end - view.start
        state = tuple(x[max(0, end - window) : end] for x in rows)
        out = handover.leave(key, view, out, state, forward_only=context.forward_only, most_rows=window)
        if context.begun is None:
            return out
        begin, end = context.begun_rows.start, context.begun_rows.stop
        state = tuple(x[max(begin, end - window) : end] for x in cached)
        return handover.leave(key, context.begun, out, state, forward_only=context.forward_only, most_rows=window)

    return context_parallel.attend(attend, q, tuple(cached))
