"""Attention of one chunk on latents: these are cached, and keys and values are made of them inside attention.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) makes the keys and values of all heads from a latent
of one token by a matrix product, and adds the same rotated channels to every key. The latent and the rotated channels are
cached, which are one or two hundredths of the keys and values. Every slice makes those of its prefix anew, by groups of heads
if there are many, in its forward and again in its backward, and adds to the gradient of that matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan.sizing import expanded_at_once
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel
from megatron_epp.runtime.attention.core import add_begun_gradient, compact, keep_begun
from megatron_epp.runtime.attention.kernels.base import Saved
from megatron_epp.runtime.attention.segments import Tensors
from megatron_epp.runtime.context import ChunkContext


class _LatentAttention(torch.autograd.Function):
    """Queries of a chunk against keys and values made of the latents of the chunk and, for a slice, of its sequence.

    As in `core`, no edge joins the graphs of two slices. The gradient of a latent adds up in the KV cache over the slices that
    read it. The gradient of the matrix is a sum over slices, of which each backward returns its share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        rotated: Tensor,
        expansion: Tensor,
        context: ChunkContext,
        layer: int,
        scale: float,
        preference: str,
    ) -> Tensor:
        view, kv_cache, table, q = context.view, context.kv_cache, context.table, compact(q)
        cached, unrotated = (latent, rotated), q.shape[2] - rotated.shape[2]
        of_none = keys_and_values((latent[:0], rotated[:0]), expansion, unrotated)
        kernel = kernels.choose(q, *of_none, preference)  # only shapes, types and device are asked for
        # What the KV cache caches is not saved here again: a slice's own tensors are in its sequence's buffers.
        own = tuple(compact(x if view is None else x[view.num_cached :]) for x in cached)
        heads, head_bytes = len(expansion), (expansion.shape[1] + rotated.shape[2]) * expansion.element_size()
        count = expanded_at_once(table.key_starts[-1], heads, head_bytes)
        groups = [slice(start, start + count) for start in range(0, heads, count)]

        def attend() -> tuple[Tensor, Saved]:
            seen = own if view is None else kv_cache.append(layer, view, cached)
            out = q.new_empty(*q.shape[:2], of_none[1].shape[2])
            saved: list[Tensor] = []
            for group in groups:
                inputs = _heads(group, q), *keys_and_values(seen, expansion[group], unrotated)
                out[:, group], more = kernel.forward(*inputs, table, scale)
                saved += more
            keep_begun(context, layer, cached)
            return out, tuple(saved)

        out, saved = attend() if context.attention_output is None else context.attention_output.once(attend)
        ctx.save_for_backward(q, out, expansion, *own, *saved)
        ctx.context, ctx.layer, ctx.scale, ctx.kernel, ctx.groups = context, layer, scale, kernel, groups
        if view is not None and view.is_last_slice and context.forward_only:  # no backward will release the cache
            kv_cache.release(layer, view)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        context: ChunkContext = ctx.context
        view, kv_cache, groups = context.view, context.kv_cache, ctx.groups
        q, out, expansion, latent, rotated, *saved = ctx.saved_tensors
        own = latent, rotated
        seen = own if view is None else kv_cache.fetch(ctx.layer, view, own)
        latents, unrotated, count = seen[0][:, 0], q.shape[2] - rotated.shape[2], len(saved) // len(groups)
        # A sum over several groups is wide: in half precision it would be rounded once for each of them.
        wide = q.dtype if len(groups) == 1 else torch.promote_types(q.dtype, torch.float32)
        sums = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in seen)
        dq, d_expansion = torch.empty_like(q), torch.empty_like(expansion)

        def run(at: int, group: slice) -> None:
            """Run one group. Its temporaries are freed on return."""
            own_grad, own_q, own_out = (_heads(group, x) for x in (grad, q, out))
            own_saved = tuple(saved[at * count : (at + 1) * count])
            k, v = keys_and_values(seen, expansion[group], unrotated)
            dq[:, group], dk, dv = ctx.kernel.backward(own_grad, own_q, k, v, own_out, own_saved, context.table, ctx.scale)
            sums[1][:, 0] += dk[..., unrotated:].sum(1)
            for gradient, rows in ((dk[..., :unrotated], slice(unrotated)), (dv, slice(unrotated, None))):
                weight, flat = expansion[group, rows], gradient.flatten(1)
                sums[0][:, 0] += flat @ weight.flatten(0, 1)
                d_expansion[group, rows] = (flat.t() @ latents).view_as(weight)

        for at, group in enumerate(groups):
            run(at, group)
        grads: Tensors = sums if view is None else kv_cache.take_gradient(ctx.layer, view, sums)
        add_begun_gradient(context, ctx.layer, grads)
        d_latent, d_rotated = (x.to(q.dtype) for x in grads)
        return dq, d_latent, d_rotated, d_expansion, None, None, None, None


def keys_and_values(cached: Tensors, expansion: Tensor, unrotated: int) -> tuple[Tensor, Tensor]:
    """Make the keys ``[tokens, heads, unrotated + rotated]`` and values ``[tokens, heads, value_channels]`` of some heads.

    Args:
        cached: latents ``[tokens, 1, rank]`` and rotated channels ``[tokens, 1, rotated]``.
        expansion: of these heads, ``[heads, unrotated + value_channels, rank]``.
        unrotated: channels of a key that do not turn with its position.
    """
    (latent, rotated), heads = cached, len(expansion)
    of_keys, of_values = (part.flatten(0, 1).t() for part in expansion.split([unrotated, expansion.shape[1] - unrotated], 1))
    keys = latent.new_empty(len(latent), heads, unrotated + rotated.shape[2])
    keys[..., :unrotated] = (latent[:, 0] @ of_keys).unflatten(1, (heads, unrotated))
    keys[..., unrotated:] = rotated
    return keys, (latent[:, 0] @ of_values).unflatten(1, (heads, -1))


def _heads(group: slice, x: Tensor) -> Tensor:
    return x[:, group].contiguous()


def latent_attention(
    q: Tensor,
    latent: Tensor,
    rotated: Tensor,
    expansion: Tensor,
    context: ChunkContext,
    layer: int,
    scale: float,
    context_parallel: ContextParallel = NOT_SHARED,
    preference: str = "auto",
) -> Tensor:
    """Causal attention inside every segment of a chunk, on keys and values made of latents, as `core.chunk_attention`.

    Args:
        q: ``[tokens, heads, unrotated + rotated]``.
        latent: ``[tokens, 1, rank]``.
        rotated: channels that all heads' keys have in common, turned by the position, ``[tokens, 1, rotated]``.
        expansion: matrix that makes a head's unrotated channels and its value, ``[heads, unrotated + value_channels, rank]``.
    """

    def attend(q: Tensor, cached: Tensors) -> Tensor:
        mine = context_parallel.own_heads(expansion)
        out: Tensor = _LatentAttention.apply(q, *cached, mine, context, layer, scale, preference)
        return out

    return context_parallel.attend(attend, q, (latent, rotated))
