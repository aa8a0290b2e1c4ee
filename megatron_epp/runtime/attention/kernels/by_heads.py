"""Attention's backward by groups of key heads, so that gradients of a long prefix are not all there at once."""

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
    """As a kernel's own backward, with the gradients of keys and values as `take` leaves them.

    To the bit, where a kernel adds in one order whatever the heads beside. FlashAttention's dq is added up by atomics in any
    order, so its last bits differ as those of two calls with all heads do.

    Args:
        take: of the gradients of keys and values of some key heads, and of which, first to last (None: all at once); they go
            when it has returned what of them is the chunk's own.
        count: key heads at a time; None for as many as memory asks for.
    """
    kv_heads, each = k.shape[1], q.shape[1] // k.shape[1]
    if count is None:
        count = heads_at_once(kv_heads, 2 * k[:, 0].numel() * k.element_size(), each)
    if count == kv_heads:
        dq, dk, dv = kernel.backward(grad, q, k, v, out, saved, table, scale)
        return dq, *take(dk, dv, None)
    made = [torch.empty((q.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device) for x in (q, k, v)]

    def run(shared: slice) -> None:
        """Nothing of a group is left when it returns."""
        own = slice(shared.start * each, shared.stop * each)
        of_keys = k[:, shared], v[:, shared]
        dq, dk, dv = kernel.backward(grad[:, own], q[:, own], *of_keys, out[:, own], kernel.of_heads(saved, own), table, scale)
        made[0][:, own] = dq
        for target, value in zip(made[1:], take(dk, dv, shared), strict=True):
            target[:, shared] = value

    for start in range(0, kv_heads, count):
        run(slice(start, min(start + count, kv_heads)))
    return made[0], made[1], made[2]
