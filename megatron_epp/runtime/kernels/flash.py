"""FlashAttention, as the flash-attn package has it and as torch ships it. Both align the mask to the bottom right."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.kernels.base import Case, Kernel, Saved, needs_half_precision_on_a_gpu
from megatron_epp.runtime.segments import SegmentTable

_MOST_EXPANDED_BYTES = 1 << 30


def _groups(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Heads of queries, and of keys, whose backward runs at once.

    Where several query heads share a key head, FlashAttention first makes the gradients of keys and values for every query
    head. Behind a prefix of a million tokens that would be gigabytes; heads do not mix, so they can go one after the other.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    each = heads // kv_heads
    expanded_bytes = 2 * each * k[:, 0].numel() * k.element_size() if each > 1 else 0
    count = kv_heads if expanded_bytes == 0 else max(1, min(kv_heads, _MOST_EXPANDED_BYTES // expanded_bytes))
    ends = [(start, min(start + count, kv_heads)) for start in range(0, kv_heads, count)]
    return [(slice(start * each, end * each), slice(start, end)) for start, end in ends]


def _of_heads(log_sums: Tensor, own: slice) -> Tensor:
    """Of ``[heads, tokens]``, or as older releases have it ``[sequences, heads, longest]``."""
    return log_sums[own] if log_sums.dim() == 2 else log_sums[:, own].contiguous()


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    cu_q, cu_k = table.cu_seqlens(q.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, table.max_query, table.max_key, 0.0, True, False, scale=scale
    )
    return out, (lse,)


def _torch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    cu_q, cu_k = table.cu_seqlens(q.device)
    sizes, no_dropout = (table.max_query, table.max_key), torch.empty(0, dtype=torch.int64, device=q.device)

    def run(own: slice, shared: slice) -> tuple[Tensor, Tensor, Tensor]:
        of_queries, of_keys = (grad[:, own], q[:, own]), (k[:, shared], v[:, shared], out[:, own], _of_heads(saved[0], own))
        return torch.ops.aten._flash_attention_backward(
            *of_queries, *of_keys, cu_q, cu_k, *sizes, 0.0, True, no_dropout, no_dropout, scale=scale
        )

    groups = _groups(q, k)
    if len(groups) == 1:
        return run(*groups[0])
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for own, shared in groups:
        dq[:, own], dk[:, shared], dv[:, shared] = run(own, shared)
    return dq, dk, dv


def _torch_obstacle(case: Case) -> str | None:
    if problem := needs_half_precision_on_a_gpu(case):
        return problem
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "it needs a GPU of compute capability 8.0 or newer"


@functools.cache
def _flash_attn() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def _package_options(table: SegmentTable, q: Tensor, scale: float) -> dict[str, Any]:
    cu_q, cu_k = table.cu_seqlens(q.device)
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": table.max_query,
        "max_seqlen_k": table.max_key,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _package_forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    out, lse, *_ = _flash_attn()._flash_attn_varlen_forward(q, k, v, **_package_options(table, q, scale))
    return out, (lse,)


def _package_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    options = _package_options(table, q, scale) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    grad = grad.contiguous()
    for own, shared in _groups(q, k):
        inputs = grad[:, own], q[:, own], k[:, shared], v[:, shared], out[:, own], _of_heads(saved[0], own)
        _flash_attn()._flash_attn_varlen_backward(*inputs, dq[:, own], dk[:, shared], dv[:, shared], **options)
    return dq, dk, dv


def _package_obstacle(case: Case) -> str | None:
    if problem := needs_half_precision_on_a_gpu(case):
        return problem
    try:
        _flash_attn()
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash-attn cannot be imported ({error}): pip install flash-attn --no-build-isolation"
    return None  # one before 2.7 takes other arguments and fails its proof; newer ones are torch operators, which hide theirs


TORCH_FLASH = Kernel("FlashAttention of torch", _torch_forward, _torch_backward, _torch_obstacle)
FLASH_ATTN = Kernel("flash-attn", _package_forward, _package_backward, _package_obstacle)
