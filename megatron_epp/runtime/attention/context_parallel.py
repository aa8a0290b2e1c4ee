"""Context parallelism: between attention calls a rank holds some of a chunk's tokens, inside them some of the heads.

As in DeepSpeed Ulysses (https://arxiv.org/abs/2309.14509): ahead of attention every rank sends each other rank the queries,
keys and values of that rank's heads, and gets all tokens of its own heads; the output goes the opposite way. A chunk's tokens
are shared out in their order, the same number to each rank, so a slice's cache holds whole sequences of a rank's own heads, and
the relay and the kernels know nothing of it. All ranks of the group must run the same actions in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def to_heads(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All tokens of this rank's heads.

    Where there are not enough heads for the ranks (grouped queries), they are repeated: heads ``[0, 1]`` over 4 ranks go out as
    ``[0, 0, 1, 1]``, and their gradients come back summed.

    Args:
        group: the context-parallel ranks, n of them.
        tensors: ``[tokens / n, heads, channels]`` each: this rank's tokens, all heads.

    Returns:
        ``[tokens, heads / n, channels]`` each, of what repeating has left of the heads.
    """
    size = dist.get_world_size(group)
    return _Exchange.apply(group, True, *(_enough_heads(x, size) for x in tensors))


def to_tokens(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """All heads of this rank's tokens: what `to_heads` does, undone.

    Args:
        group: the context-parallel ranks, n of them.
        tensor: ``[tokens, heads / n, channels]``.

    Returns:
        ``[tokens / n, heads, channels]``.
    """
    (out,) = _Exchange.apply(group, False, tensor)
    return out


def _enough_heads(x: Tensor, size: int) -> Tensor:
    tokens, heads, channels = x.shape
    copies = math.lcm(heads, size) // heads
    return x if copies == 1 else x.unsqueeze(2).expand(tokens, heads, copies, channels).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Tokens for heads, or heads for tokens; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, for_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.for_heads = group, for_heads
        return _exchange(group, for_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(ctx.group, not ctx.for_heads, grads)


def _exchange(group: dist.ProcessGroup, for_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Every tensor in a collective of its own, all under way together."""
    size = dist.get_world_size(group)
    parts = [_parts_by_heads(x, size) if for_heads else _parts_by_tokens(x, size) for x in tensors]
    received = [torch.empty_like(x) for x in parts]
    pairs = zip(received, parts, strict=True)
    for work in [dist.all_to_all_single(into, x, group=group, async_op=True) for into, x in pairs]:
        work.wait()
    if for_heads:
        return tuple(x.flatten(0, 1) for x in received)
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in received)


def _parts_by_heads(x: Tensor, size: int) -> Tensor:
    """``[tokens, heads, channels]`` to ``[size, tokens, heads / size, channels]``: entry r is for rank r."""
    return x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()


def _parts_by_tokens(x: Tensor, size: int) -> Tensor:
    """``[tokens, heads, channels]`` to ``[size, tokens / size, heads, channels]``: entry r is for rank r."""
    return x.unflatten(0, (size, -1)).contiguous()
