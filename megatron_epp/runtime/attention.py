"""Attention of one chunk in one layer, with the KV relay for its slice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.runtime import kernels
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.ulysses import to_heads, to_tokens


class _ChunkAttention(torch.autograd.Function):
    """Queries of a chunk against its own keys and, for a slice, its sequence's cache.

    What a slice attends to stays in the relay, not in this graph: no edge joins the graphs of two slices, so each can run
    backward on its own as long as later slices go first.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: ChunkContext, layer: int, scale: float, preference: str
    ) -> Tensor:
        view = context.view
        q = _compact(q)
        if view is None:
            kept = seen = _compact(k), _compact(v)
        else:
            seen = context.relay.append(layer, view, k, v)
            kept = _compact(k[view.num_cached :]), _compact(v[view.num_cached :])
        kernel = kernels.choose(q, k, preference)
        if context.attended is None:
            out, saved = kernel.forward(q, *seen, context.table, scale)
        else:
            out, saved = context.attended.once(lambda: kernel.forward(q, *seen, context.table, scale))
        ctx.save_for_backward(q, out, *kept, *saved)
        ctx.context, ctx.layer, ctx.scale, ctx.kernel = context, layer, scale, kernel
        if view is not None and view.is_tail and context.forward_only:
            context.relay.release(layer, view)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context: ChunkContext = ctx.context
        view = context.view
        q, out, k, v, *saved = ctx.saved_tensors
        seen = (k, v) if view is None else context.relay.keys_and_values(ctx.layer, view, k, v)
        dq, dk, dv = ctx.kernel.backward(grad, q, *seen, out, tuple(saved), context.table, ctx.scale)
        if view is not None:
            dk, dv = context.relay.take_gradient(ctx.layer, view, dk, dv)
        return dq, dk, dv, None, None, None, None


def _compact(x: Tensor) -> Tensor:
    """Queries, keys and values are often views of one projection: saving any of them would keep all of it. And some kernels see
    addresses only, no strides.
    """
    dense = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ChunkContext,
    layer: int,
    scale: float,
    group: dist.ProcessGroup | None = None,
    preference: str = "auto",
) -> Tensor:
    """Causal attention inside every segment of a chunk.

    Args:
        q: ``[tokens, query_heads, channels]``, tokens in the chunk's order, padding last; where `group` is given, this rank's
            share of them.
        k: ``[tokens, kv_heads, channels]``.
        v: as `k`.
        context: the chunk being run.
        layer: number of the layer, unique in its stage.
        scale: of the scores, usually ``channels ** -0.5``.
        group: the ranks that share the chunk's tokens (context parallelism); their number divides `query_heads`.
        preference: of kernels, a key of `kernels.PREFERENCES`.

    Returns:
        ``[tokens, query_heads, channels]``.

    Raises:
        RelayError: the slices of a sequence run in an order its plan rules out.
        EppError: no kernel of the preference can serve.
    """
    if group is None:
        return _ChunkAttention.apply(q, k, v, context, layer, scale, preference)
    return to_tokens(group, _ChunkAttention.apply(*to_heads(group, q, k, v), context, layer, scale, preference))
