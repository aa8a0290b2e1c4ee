"""Interface of attention kernels, what they share, and backward by groups of key heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan.shape_classes import token_class
from megatron_epp.plan.sizing import heads_at_once
from megatron_epp.runtime.attention.segments import SegmentTable, Tensors

type Saved = tuple[Tensor, ...]
"""Tensors a forward saves for its backward in addition to q, k, v and output, the log-sum-exp first."""
type Forward = Callable[[Tensor, Tensor, Tensor, SegmentTable, float], tuple[Tensor, Saved]]
type Gradients = tuple[Tensor, Tensor, Tensor]
type Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Saved, SegmentTable, float], Gradients]
type TakeGradients = Callable[[Tensor, Tensor, slice | None], Tensors]
"""Function from the gradients of keys and values of some key heads, and the heads (None: all), to the gradients of the cached
tensors of the chunk's own tokens."""


class AttentionCase(NamedTuple):
    """Properties of this rank's tensors (not of the chunk) on which the choice of a kernel depends.

    `channels` is the width of a head of queries and keys; `value_channels` is the width of values, or 0 if it is the same. Some
    layers have a window (`SegmentTable.window`), and some have sinks (`add_sinks`).
    """

    device: str
    dtype: torch.dtype
    channels: int
    query_heads: int
    kv_heads: int
    value_channels: int = 0
    has_window: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """Causal variable-length attention of a chunk's segments against their own prefixes, in one call for all of them.

    Queries are ``[tokens, query_heads, channels]``, keys ``[keys, kv_heads, channels]`` and values ``[keys, kv_heads,
    value_channels]``, where segment i owns ``keys[key_starts[i]:key_starts[i + 1]]``. The mask is aligned to the bottom right:
    the last query of a segment sees all of its keys. Without the mask, where a table is not `causal`, every query does.
    """

    name: str
    # Function of ``(q, k, v, table, scale)``; returns the output ``[tokens, query_heads, value_channels]``, and what backward
    # needs
    forward: Forward
    # Function of ``(grad, q, k, v, out, saved, table, scale)``; returns the gradients of q, k and v; gradients of k and v cover
    # the prefixes too
    backward: Backward
    obstacle: Callable[[AttentionCase], str | None]  # returns why it cannot be used for a case here, or None
    # selects, from the tensors saved by a forward of all heads, what a backward of some query heads, or of some tokens (all by
    # default), needs: by default of a log-sum-exp ``[heads, tokens]``, or of older FlashAttentions ``[sequences, heads,
    # longest]``
    of_heads: Callable[..., Saved] = lambda saved, own, tokens=slice(None): (saved[0][..., own, tokens].contiguous(),)
    # Returns a view of the log-sum-exp among them, ``[query_heads, tokens]``
    log_sums: Callable[[Saved], Tensor] = lambda saved: saved[0]
    # Its library builds a plan for every class of calls (`plan.shape_classes`), one for forwards and one for backwards, in
    # every thread and for every number of heads
    builds_plans: bool = False
    rates: str = ""  # name of its published rates, of `plan.flags.KERNELS`; empty for none


def add_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Give every head's softmax one more score, whose value is zero, in place: in the output of a kernel and its log-sum-exp.

    With these the kernel's own backward computes the gradients of queries, keys and values: it takes the weights from the
    log-sum-exp, and their gradient's mean over the scores from the output.

    Shapes are ``[tokens, query_heads, value_channels]``, ``[query_heads, tokens]``, and ``[query_heads]`` of the sinks' scores.
    """
    with_sinks = torch.logaddexp(log_sums, sinks[:, None].to(log_sums.dtype))
    out.mul_((log_sums - with_sinks).exp().t().unsqueeze(-1))
    log_sums.copy_(with_sinks)


def sinks_gradient(grad: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, given that of the output, and output and log-sum-exp as `add_sinks` leaves them."""
    weights = (sinks[:, None].to(log_sums.dtype) - log_sums).exp()
    of_output = (grad * out).sum(-1, dtype=log_sums.dtype)
    return -(weights * of_output.t()).sum(1).to(sinks.dtype)


MOST_CHANNELS = 256
"""Largest number of channels of a head that fused kernels take."""


def needs_half_precision_on_a_gpu(case: AttentionCase) -> str | None:
    """Return why no fused kernel can be used for a case, or None: limits that all of them share."""
    if case.device != "cuda":
        return "it runs on GPUs"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return "it runs in bf16 and fp16"
    if case.channels > MOST_CHANNELS or case.channels % 8 != 0:
        return f"heads of {case.channels} channels: it takes multiples of 8 up to {MOST_CHANNELS}"
    if case.value_channels not in (0, case.channels):
        return f"values of {case.value_channels} channels: it takes as many as keys have, {case.channels}"
    return None


@functools.cache
def of_narrow_values(kernel: Kernel) -> Kernel:
    """Return a kernel for values narrower than keys, by one that takes values as wide as keys: with zeros behind every value.

    The zeros add nothing to scores or gradients; what they make of the output is cut off. It costs the products of the zeros.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
        out, saved = kernel.forward(q, k, _widened(v, k.shape[2]), table, scale)
        return out[..., : v.shape[2]].contiguous(), saved

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide_grad, wide_v, wide_out = (_widened(x, k.shape[2]) for x in (grad, v, out))
        dq, dk, dv = kernel.backward(wide_grad, q, k, wide_v, wide_out, saved, table, scale)
        return dq, dk, dv[..., : v.shape[2]]

    def obstacle(case: AttentionCase) -> str | None:
        if case.value_channels > case.channels:
            return f"values of {case.value_channels} channels: it takes at most as many as keys have, {case.channels}"
        return kernel.obstacle(case._replace(value_channels=0))

    return replace(kernel, forward=forward, backward=backward, obstacle=obstacle)


def _widened(x: Tensor, channels: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, channels - x.shape[2]))


def heads_of_backward(query_heads: int, k: Tensor, v: Tensor) -> int:
    bytes_per_key = (k.shape[2] + v.shape[2]) * k.element_size()
    return heads_at_once(k.shape[1], token_class(k.shape[0]) * bytes_per_key, query_heads // k.shape[1])


def backward_by_heads(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Saved,
    table: SegmentTable,
    scale: float,
    take: TakeGradients,
    count: int | None = None,
) -> Tensors:
    """Run a kernel's backward by groups of key heads, so that few heads' gradients of a long prefix are in memory at a time.

    Returns the gradient of q, and what `take` returns, of all heads. Results are bitwise equal to one call with all heads, if
    the kernel's order of summation does not depend on the number of heads. FlashAttention sums dq by atomics in any order, so
    its last bits differ, as they do between two calls with all heads. `take` gets the gradients of keys and values of one group
    after the other, first to last, which are freed afterwards. By default the memory that they need decides the number of
    heads, `count`.
    """
    kv_heads, each = k.shape[1], q.shape[1] // k.shape[1]
    if count is None:
        count = heads_of_backward(q.shape[1], k, v)
    if count == kv_heads:
        dq, dk, dv = kernel.backward(grad, q, k, v, out, saved, table, scale)
        return dq, *take(dk, dv, None)
    dq_all, gradients = q.new_empty(q.shape), list[Tensor]()

    def run(shared: slice) -> None:
        """Run one group. Its temporaries are freed on return."""
        own = slice(shared.start * each, shared.stop * each)
        seen = k[:, shared], v[:, shared]
        dq, dk, dv = kernel.backward(grad[:, own], q[:, own], *seen, out[:, own], kernel.of_heads(saved, own), table, scale)
        dq_all[:, own] = dq
        taken = take(dk, dv, shared)
        if not gradients:
            gradients.extend(x.new_empty((x.shape[0], kv_heads, x.shape[2])) for x in taken)
        for target, value in zip(gradients, taken, strict=True):
            target[:, shared] = value

    for start in range(0, kv_heads, count):
        run(slice(start, min(start + count, kv_heads)))
    return dq_all, *gradients
