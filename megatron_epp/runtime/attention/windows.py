"""Attention of one chunk in a layer that sees a window of earlier tokens: a slice hands the rows in it on to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel
from megatron_epp.runtime.attention.core import ChunkAttention
from megatron_epp.runtime.attention.segments import Tensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover, behind_tails, of_chunk, tails_of


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
    handover, own, key = context.kv_cache.carried(Handover), of_chunk(context), -1 - layer  # others hand on by numbers from 0
    own_sinks = None if sinks is None else context_parallel.own_heads(sinks, cached[0].shape[1])
    alone = replace(context, table=own.table.within(window), view=None, begun=None)

    def attend(q: Tensor, cached: Tensors) -> Tensor:
        """Attend to the chunk's own keys and values, each segment's behind the last ones ahead of it."""
        tails, ends = tails_of(own, handover.enter(key, context), cached, window)
        rows = behind_tails(own, tails, cached)
        out: Tensor = ChunkAttention.apply(q, alone, layer, scale, preference, own_sinks, *rows)
        return handover.leave(key, context, out, ends, most_rows=window)

    return context_parallel.attend(attend, q, tuple(cached))
