"""Attention backward by groups of key heads, so that only one group's gradients of a long prefix are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_epp.plan.fresh import heads_at_once
from megatron_epp.runtime.attention.kernels.base import Kernel, Saved
from megatron_epp.runtime.attention.segments import SegmentTable

type Take = Callable[[Tensor, Tensor, slice | None], tuple[Tensor, Tensor]]


def backward(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Saved,
    table: SegmentTable,
    scale: float,
    take: Take,
    count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel's backward by groups of key heads, with the gradients of keys and values as `take` returns them.

    Results are bitwise those of one call with all heads, if the kernel's order of summation does not depend on the number of
    heads. FlashAttention sums dq by atomics in any order, so its last bits differ, as those of two calls with all heads do.

    Args:
        take: called with the gradients of keys and values of some key heads, and with the heads' slice, first to last (None:
            all at once); returns the part that belongs to the chunk's own tokens. The gradients are freed afterwards.
        count: key heads at a time; None to choose it by the memory that the gradients need.

    Returns:
        the gradients of q, k and v.
    """
    kv_heads, each = k.shape[1], q.shape[1] // k.shape[1]
    if count is None:
        count = heads_at_once(kv_heads, 2 * k[:, 0].numel() * k.element_size(), each)
    if count == kv_heads:
        dq, dk, dv = kernel.backward(grad, q, k, v, out, saved, table, scale)
        return dq, *take(dk, dv, None)
    made = [torch.empty((q.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device) for x in (q, k, v)]

    def run(shared: slice) -> None:
        """Run one group. Its temporaries are freed on return."""
        own = slice(shared.start * each, shared.stop * each)
        of_keys = k[:, shared], v[:, shared]
        dq, dk, dv = kernel.backward(grad[:, own], q[:, own], *of_keys, out[:, own], kernel.of_heads(saved, own), table, scale)
        made[0][:, own] = dq
        for target, value in zip(made[1:], take(dk, dv, shared), strict=True):
            target[:, shared] = value

    for start in range(0, kv_heads, count):
        run(slice(start, min(start + count, kv_heads)))
    return made[0], made[1], made[2]
