"""Context parallelism: how the ranks of a group share the tokens of a chunk, between attention calls and inside them.

A scheme says which tokens each rank has (`shards`) and how attention runs on them (`attend`). What a scheme costs is in
`formulas.model_shape`. All ranks of the group must run the same actions in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_epp.plan.sizing import shared_heads
from megatron_epp.runtime.attention.segments import Tensors

Attend = Callable[[Tensor, Tensors], Tensor]
"""Function from queries and cached tensors, ``[tokens, heads, *]``, to attention's output, ``[tokens, query_heads, *]``."""


class ContextParallel:
    rank: int = 0  # this rank's number among those that share a chunk

    def shards(self, num_tokens: int) -> tuple[tuple[slice, ...], ...]:
        """Return every rank's tokens among the `num_tokens` (padded) tokens of a chunk, in the order in which it has them."""
        return ((slice(0, num_tokens),),)

    def shard(self, num_tokens: int) -> tuple[slice, ...]:
        return self.shards(num_tokens)[self.rank]

    def shards_of_loss(self, scope: str, num_tokens: int) -> tuple[tuple[slice, ...], ...]:
        """Return the tokens that a loss of this `losses.Scope` gets on a rank: its own, or those of every rank."""
        return (self.shard(num_tokens),) if scope == "token" else self.shards(num_tokens)

    def attend(self, attend: Attend, q: Tensor, cached: Tensors) -> Tensor:
        """Run core attention; `attend` runs it on this rank, of all tokens of a chunk for some heads.

        Queries are ``[own tokens, query_heads, channels]``, cached tensors ``[own tokens, kv_heads, width]`` each, and the
        result is ``[own tokens, query_heads, value_channels]``.
        """
        return attend(q, cached)

    def own_heads(self, weight: Tensor, kv_heads: int = 1) -> Tensor:
        """Return this rank's heads of a weight ``[heads, *]``, where cached tensors of its attention have `kv_heads`."""
        return weight


NOT_SHARED = ContextParallel()


@dataclass(frozen=True, slots=True)
class HeadExchange(ContextParallel):
    """Exchange of tokens for heads around attention, as in DeepSpeed Ulysses (https://arxiv.org/abs/2309.14509).

    Ahead of attention every rank sends each other rank the queries and cached tensors of that rank's heads, and gets all tokens
    of its own heads; the output goes the opposite way. Tokens are shared out in their order, the same number to each rank, so a
    slice's cache holds whole sequences, and kernels know nothing of it. Where the group's size does not divide the query heads,
    heads of zeros are added (`sizing.shared_heads`).
    """

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:  # type: ignore[override]
        return dist.get_rank(self.group)

    def shards(self, num_tokens: int) -> tuple[tuple[slice, ...], ...]:
        size = dist.get_world_size(self.group)
        return tuple((slice(index * num_tokens // size, (index + 1) * num_tokens // size),) for index in range(size))

    def attend(self, attend: Attend, q: Tensor, cached: Tensors) -> Tensor:
        kv_heads = cached[0].shape[1]
        of_each = q.shape[1] // kv_heads
        keys, queries = shared_heads(kv_heads, of_each, dist.get_world_size(self.group))
        filled = (_with_zeros(x, 1, kv_heads, (keys, x.shape[1] // kv_heads)) for x in cached)
        q, *cached_heads = to_heads(self.group, _with_zeros(q, 1, kv_heads, (keys, queries)), *filled)
        out = to_tokens(self.group, attend(q, tuple(cached_heads)))
        if (keys, queries) == (kv_heads, of_each):
            return out
        return out.unflatten(1, (keys, queries))[:, :kv_heads, :of_each].flatten(1, 2)

    def own_heads(self, weight: Tensor, kv_heads: int = 1) -> Tensor:
        size = dist.get_world_size(self.group)
        sizes = shared_heads(kv_heads, len(weight) // kv_heads, size)
        return _with_zeros(weight, 0, kv_heads, sizes).chunk(size)[dist.get_rank(self.group)]


def of_group(group: dist.ProcessGroup) -> ContextParallel:
    """Return the scheme for a group of context-parallel ranks, which may be one rank."""
    return HeadExchange(group) if dist.get_world_size(group) > 1 else NOT_SHARED


def to_heads(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's heads, ``[tokens, heads / n, channels]`` each, for a group of n context-parallel ranks.

    `tensors` are ``[tokens / n, heads, channels]`` each: this rank's tokens, all heads. Where there are not enough heads for
    the ranks (grouped queries), they are repeated: heads ``[0, 1]`` over 4 ranks go out as ``[0, 0, 1, 1]``, and their
    gradients come back summed.
    """
    size = dist.get_world_size(group)
    return _Exchange.apply(group, True, *(_enough_heads(x, size) for x in tensors))


def to_tokens(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """Return all heads of this rank's tokens, ``[tokens / n, heads, channels]``: what `to_heads` does, undone."""
    (out,) = _Exchange.apply(group, False, tensor)
    return out


def _with_zeros(x: Tensor, dim: int, kv_heads: int, sizes: tuple[int, int]) -> Tensor:
    """Add heads of zeros to dimension `dim`, so that there are ``sizes[0]`` key heads with ``sizes[1]`` heads each."""
    groups = x.unflatten(dim, (kv_heads, -1))
    more = sizes[1] - groups.shape[dim + 1], sizes[0] - kv_heads
    return F.pad(groups, (*[0, 0] * (x.dim() - dim - 1), 0, more[0], 0, more[1])).flatten(dim, dim + 1) if any(more) else x


def _enough_heads(x: Tensor, size: int) -> Tensor:
    tokens, heads, channels = x.shape
    copies = math.lcm(heads, size) // heads
    return x if copies == 1 else x.unsqueeze(2).expand(tokens, heads, copies, channels).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Exchange of tokens for heads, or of heads for tokens; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, for_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.for_heads = group, for_heads
        return _exchange(group, for_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(ctx.group, not ctx.for_heads, grads)


def _exchange(group: dist.ProcessGroup, for_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Exchange every tensor in its own collective; all of them are in flight at the same time."""
    size = dist.get_world_size(group)
    split, join = (1, 0) if for_heads else (0, 1)  # dimensions: 0 of tokens, 1 of heads
    parts = [x.unflatten(split, (size, -1)).movedim(split, 0).contiguous() for x in tensors]  # entry r is for rank r
    received = [torch.empty_like(x) for x in parts]
    pairs = zip(received, parts, strict=True)
    # A list: all are launched before the first is waited for.
    for work in [dist.all_to_all_single(into, x, group=group, async_op=True) for into, x in pairs]:
        work.wait()
    return tuple(x.movedim(0, join).flatten(join, join + 1) for x in received)
