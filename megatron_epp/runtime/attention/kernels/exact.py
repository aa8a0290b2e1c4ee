"""Exact attention in blocks of plain torch operations, merged by their log-sum-exp: any dtype, any device.

The log-sum-exp is ``[query_heads, tokens]``, in float64 for float64 and in float32 for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_epp.runtime.attention.kernels.base import Kernel, Saved
from megatron_epp.runtime.attention.segments import SegmentTable


def _heads_first(x: Tensor, num_heads: int) -> Tensor:
    """Convert ``[tokens, heads, channels]`` to ``[1, num_heads, tokens, channels]``, repeating grouped heads."""
    repeats = num_heads // x.shape[1]
    if repeats > 1:
        x = x.repeat_interleave(repeats, dim=1)
    return x.transpose(0, 1).unsqueeze(0)


class _Block(NamedTuple):
    """Dense part of the mask: all of a segment's queries against its prefix or itself, or some against their windows."""

    queries: slice
    keys: slice
    causal: bool = False
    merge: bool = False  # true if the rows already hold the result of an earlier block
    window: int | None = None  # keys ahead of its own that a query sees; the block's keys begin with the first query's window


_WINDOW_QUERIES = 128
"""Least number of queries of a block with a window; not measured."""


def _blocks(table: SegmentTable) -> Iterator[_Block]:
    for segment, q0, k0 in zip(table.segments, table.query_starts, table.key_starts, strict=False):
        if table.window is not None:  # about as many keys outside the windows as inside
            step = max(table.window, _WINDOW_QUERIES)
            for first in range(0, segment.num_tokens, step):
                last = min(first + step, segment.num_tokens)
                begin = max(0, segment.start + first - table.window)
                yield _Block(slice(q0 + first, q0 + last), slice(k0 + begin, k0 + segment.start + last), window=table.window)
            continue
        queries = slice(q0, q0 + segment.num_tokens)
        if not table.causal:
            yield _Block(queries, slice(k0, k0 + segment.end))
            continue
        prefix_end = k0 + segment.start
        if segment.start > 0:
            yield _Block(queries, slice(k0, prefix_end), causal=False, merge=False)
        yield _Block(queries, slice(prefix_end, k0 + segment.end), causal=True, merge=segment.start > 0)


def _as_wide(*tensors: Tensor) -> list[Tensor]:
    """Pad tensors with zeros to the widest's channels: torch's CPU kernel takes keys and values of one width only."""
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else functional.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, window: int | None) -> Tensor:
    """Return the scores of one block, heads first; the last query sees the last key."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if not causal and window is None:
        return scores
    queries, keys = scores.shape[-2:]
    behind = torch.arange(queries, device=q.device)[:, None] + (keys - queries) - torch.arange(keys, device=q.device)
    hidden = behind < 0 if window is None else (behind < 0) | (behind > window)
    return scores.masked_fill_(hidden, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Run one dense block, heads first: ``(out [1, heads, n, value_channels], lse [1, heads, n])``."""
    if window is not None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = _scores(q.to(dtype), k.to(dtype), scale, causal, window)
        lse = scores.logsumexp(-1)
        return torch.matmul((scores - lse.unsqueeze(-1)).exp().to(q.dtype), v), lse
    if q.device.type == "cpu":
        wide = _as_wide(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal, scale=scale)
        return out[..., : v.shape[-1]], lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one block, given the output and log-sum-exp of the whole row."""
    if q.device.type == "cpu" and window is None:
        wide = _as_wide(grad, q, k, v, out)
        padded = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*wide, lse, 0.0, causal, scale=scale)
        dq, dk, dv = (whole[..., : x.shape[-1]] for whole, x in zip(padded, (q, k, v), strict=True))
        return dq, dk, dv
    weights = torch.exp(_scores(q, k, scale, causal, window) - lse.unsqueeze(-1))  # as wide as the log-sum-exp
    delta = (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
    d_scores = (weights * (torch.matmul(grad, v.transpose(-1, -2)) - delta) * scale).to(q.dtype)
    weights = weights.to(q.dtype)
    return torch.matmul(d_scores, k), torch.matmul(d_scores.transpose(-1, -2), q), torch.matmul(weights.transpose(-1, -2), grad)


def _forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    num_heads = q.shape[1]
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = torch.empty(num_heads, q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for queries, keys, causal, merge, window in _blocks(table):
        own_q, own_k, own_v = (_heads_first(x, num_heads) for x in (q[queries], k[keys], v[keys]))
        part, part_lse = _attend(own_q, own_k, own_v, causal, scale, window)
        part, part_lse = part[0].transpose(0, 1), part_lse[0]
        if merge:
            both = torch.logaddexp(lse[:, queries], part_lse)
            earlier, share = ((x - both).exp().t().unsqueeze(-1) for x in (lse[:, queries], part_lse))
            part, part_lse = out[queries] * earlier + part * share, both
        out[queries] = part
        lse[:, queries] = part_lse
    return out, (lse,)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_groups = q.shape[1], k.shape[1]
    dq = torch.empty_like(q)
    dk, dv = (torch.empty_like(x) if table.window is None else torch.zeros_like(x) for x in (k, v))
    for queries, keys, causal, merge, window in _blocks(table):
        own_grad, own_q, own_out = (_heads_first(x[queries], num_heads) for x in (grad, q, out))
        own_k, own_v = (_heads_first(x[keys], num_heads) for x in (k, v))
        row_lse = saved[0][:, queries].unsqueeze(0)
        gq, *gkv = _attend_backward(own_grad, own_q, own_k, own_v, own_out, row_lse, causal, scale, window)
        gq = gq[0].transpose(0, 1)
        dq[queries] = dq[queries] + gq if merge else gq
        for target, value in zip((dk, dv), gkv, strict=True):
            heads = value[0].transpose(0, 1)  # [keys, heads, channels]
            part = heads if num_groups == num_heads else heads.unflatten(1, (num_groups, -1)).sum(2)
            target[keys] = part if window is None else target[keys] + part  # keys are in the windows of two blocks
    return dq, dk, dv


EXACT_ATTENTION = Kernel("exact blocks of torch", _forward, _backward, lambda case: None)
