"""Attention of one chunk in one layer, with the KV cache of its slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel
from megatron_epp.runtime.attention.kernels.base import Saved, add_sinks, backward_by_heads, sinks_gradient
from megatron_epp.runtime.attention.segments import Tensors
from megatron_epp.runtime.context import ChunkContext


class ChunkAttention(torch.autograd.Function):
    """Queries of a chunk against what is cached of the chunk and, for a slice, of its sequence.

    What a slice attends to stays in the KV cache, not in this graph: no edge joins the graphs of two slices, so each can run
    backward on its own as long as later slices go first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        context: ChunkContext,
        layer: int,
        scale: float,
        preference: str,
        sinks: Tensor | None,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        view, kv_cache, q, cached = context.view, context.kv_cache, compact(q), (k, v)
        # Of no tokens: only shapes, types and device are asked for.
        has_window, has_sinks = context.table.window is not None, sinks is not None
        kernel, table = kernels.choose(q, k[:0], v[:0], preference, has_window=has_window, has_sinks=has_sinks), context.table
        if view is not None:
            view, kernel, table = view.call(kernel, table, (q, k, v))
        parts = 1 if view is None else kv_cache.parts(view, cached[0].shape[1])
        # What the KV cache caches is not saved here again: a slice's own tensors are in its sequence's buffers.
        uncached = tuple(compact(x if view is None else x[view.num_cached :]) for x in cached)

        def attend() -> tuple[Tensor, Saved]:
            outs: list[Tensor] = []
            saved: list[Tensor] = []
            for part in range(parts):
                part_q, part_k, part_v = _heads(part, parts, (q, *(uncached if view is None else cached)))
                if view is not None:
                    part_k, part_v = kv_cache.append(layer, view, (part_k, part_v), part)
                out, more = kernel.forward(part_q, part_k, part_v, table, scale)
                if sinks is not None:
                    add_sinks(out, kernel.log_sums(more), sinks.chunk(parts)[part])
                outs.append(out)
                saved += more
            keep_begun(context, layer, cached)
            return _joined(outs), tuple(saved)

        out, saved = attend() if context.attention_output is None else context.attention_output.once(attend)
        ctx.save_for_backward(q, out, sinks, *uncached, *saved)
        ctx.context, ctx.layer, ctx.scale, ctx.parts, ctx.call = context, layer, scale, parts, (view, kernel, table)
        if view is not None and view.is_last_slice and context.forward_only:  # no backward will release the cache
            for part in range(parts):
                kv_cache.release(layer, view, part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context: ChunkContext = ctx.context
        (view, kernel, table), kv_cache, parts, layer = ctx.call, context.kv_cache, ctx.parts, ctx.layer
        q, out, sinks, k, v, *saved = ctx.saved_tensors
        count = len(saved) // parts
        grads: list[Tensors] = []
        of_sinks: list[Tensor] = []
        for part in reversed(range(parts)):  # last to first: after a recomputed forward the last group is still in its buffer
            part_grad, part_q, part_out, *uncached = _heads(part, parts, (grad, q, out, k, v))
            seen = tuple(uncached) if view is None else kv_cache.fetch(layer, view, uncached, part)
            part_saved = tuple(saved[part * count : (part + 1) * count])

            def take(dk: Tensor, dv: Tensor, heads: slice | None, part: int = part) -> Tensors:
                return (dk, dv) if view is None else kv_cache.take_gradient(layer, view, (dk, dv), part, heads)

            if sinks is not None:
                of_sinks.insert(0, sinks_gradient(part_grad, part_out, kernel.log_sums(part_saved), sinks.chunk(parts)[part]))
            inputs = part_grad, part_q, seen[0], seen[1], part_out, part_saved, table, ctx.scale
            grads.insert(0, backward_by_heads(kernel, *inputs, take))
        dq, dk, dv = (_joined(each) for each in zip(*grads, strict=True))
        add_begun_gradient(context, layer, (dk, dv))
        return dq, None, None, None, None, torch.cat(of_sinks) if of_sinks else None, dk, dv


def _heads(part: int, parts: int, tensors: Iterable[Tensor]) -> Tensors:
    """Select a group of heads of each tensor, ``[tokens, heads, channels]``; all of them as they are if there is one group."""
    return tuple(tensors) if parts == 1 else tuple(x.chunk(parts, 1)[part].contiguous() for x in tensors)


def _joined(groups: Sequence[Tensor]) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.cat(tuple(groups), 1)


def keep_begun(context: ChunkContext, layer: int, cached: Tensors) -> None:
    """Copy what a chunk caches of a sequence that it begins behind another one's end, for that sequence's next slice."""
    if context.begun is not None:
        context.kv_cache.append(layer, context.begun, tuple(x[context.begun_rows] for x in cached))


def add_begun_gradient(context: ChunkContext, layer: int, grads: Tensors) -> None:
    """Add the gradients of the later slices of such a sequence to those of the chunk's tokens, and free its cache."""
    if context.begun is not None:
        rows, kv_cache = context.begun_rows, context.kv_cache
        kv_cache.fetch(layer, context.begun, tuple(x[:0] for x in grads))
        complete = kv_cache.take_gradient(layer, context.begun, tuple(x[rows] for x in grads))
        for grad, own in zip(grads, complete, strict=True):
            grad[rows] = own


def compact(x: Tensor) -> Tensor:
    """Return a tensor that is dense and has a storage of its own, itself if it has.

    Queries, keys and values are often views of one projection: saving any of them would keep all of it. And some kernels see
    addresses only, no strides.
    """
    dense = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def chunk_attention(
    q: Tensor,
    cached: Sequence[Tensor],
    context: ChunkContext,
    layer: int,
    scale: float,
    context_parallel: ContextParallel = NOT_SHARED,
    preference: str = "auto",
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside every segment of a chunk, ``[tokens, query_heads, value_channels]``.

    Raises `KVCacheError` if the slices of a sequence run in an order its plan rules out, and `EppError` if no kernel of the
    preference can serve.

    Args:
        q: ``[tokens, query_heads, channels]``, tokens in the chunk's order, padding last; this rank's share of them where ranks
            share the chunk's tokens.
        cached: keys and values, ``[tokens, kv_heads, width]`` each.
        layer: number of the layer, unique in its stage.
        scale: factor on the scores, usually ``channels ** -0.5``.
        sinks: one more score of every softmax, whose value is zero, ``[query_heads]``.
    """
    own_sinks = None if sinks is None else context_parallel.own_heads(sinks, cached[0].shape[1])

    def attend(q: Tensor, cached: Tensors) -> Tensor:
        out: Tensor = ChunkAttention.apply(q, context, layer, scale, preference, own_sinks, *cached)
        return out

    return context_parallel.attend(attend, q, tuple(cached))
