"""Attention of one chunk in one layer, with the KV relay for its slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.context_parallel import to_heads, to_tokens
from megatron_epp.runtime.attention.kernels import by_heads
from megatron_epp.runtime.attention.kernels.base import Saved
from megatron_epp.runtime.context import ChunkContext


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
        kernel = kernels.choose(q, k, preference)
        caches = None if view is None else context.relay.caches_of(view)
        parts = 1 if caches is None else caches.parts(k.shape[1])
        kept = (_compact(k), _compact(v)) if view is None else tuple(_compact(x[view.num_cached :]) for x in (k, v))

        def attend() -> tuple[Tensor, Saved]:
            outs, saved = [], []
            for part in range(parts):
                own = _heads(part, parts, q, *(kept if caches is None else (k, v)))
                seen = own[1:] if caches is None or view is None else caches.append(layer, view, *own[1:], part)
                out, more = kernel.forward(own[0], *seen, context.table, scale)
                outs.append(out)
                saved += more
            return _joined(outs), tuple(saved)

        out, saved = attend() if context.attended is None else context.attended.once(attend)
        ctx.save_for_backward(q, out, *kept, *saved)
        ctx.context, ctx.layer, ctx.scale, ctx.kernel, ctx.parts = context, layer, scale, kernel, parts
        if caches is not None and view is not None and view.is_tail and context.forward_only:
            caches.release(layer, view)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context: ChunkContext = ctx.context
        view, parts, layer = context.view, ctx.parts, ctx.layer
        caches = None if view is None else context.relay.caches_of(view)
        q, out, k, v, *saved = ctx.saved_tensors
        count = len(saved) // parts
        grads: list[tuple[Tensor, ...]] = []
        for part in reversed(range(parts)):
            own_grad, own_q, own_out, *own = _heads(part, parts, grad, q, out, k, v)
            seen = own if caches is None or view is None else caches.keys_and_values(layer, view, *own, part)
            own_saved = tuple(saved[part * count : (part + 1) * count])

            def take(dk: Tensor, dv: Tensor, heads: slice | None, part: int = part) -> tuple[Tensor, Tensor]:
                return (dk, dv) if caches is None or view is None else caches.take_gradient(layer, view, dk, dv, part, heads)

            inputs = own_grad, own_q, *seen, own_out, own_saved, context.table, ctx.scale
            grads.insert(0, by_heads.backward(ctx.kernel, *inputs, take))
        dq, dk, dv = (_joined(each) for each in zip(*grads, strict=True))
        return dq, dk, dv, None, None, None, None


def _heads(part: int, parts: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """A group of heads of each tensor, ``[tokens, heads, channels]``; all of them as they are where there is one group."""
    return tensors if parts == 1 else tuple(x.chunk(parts, 1)[part].contiguous() for x in tensors)


def _joined(groups: Sequence[Tensor]) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.cat(tuple(groups), 1)


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
