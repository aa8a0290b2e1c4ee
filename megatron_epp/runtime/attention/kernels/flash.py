"""FlashAttention 3, FlashAttention 2 as the flash-attn package has it, and as torch ships it. All align the mask to the bottom
right, and none builds anything for a new shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan.flags import FLASH_2, FLASH_3
from megatron_epp.runtime.attention.kernels.base import AttentionCase, Gradients, Kernel, Saved, needs_half_precision_on_a_gpu
from megatron_epp.runtime.attention.segments import SegmentTable


def _window(table: SegmentTable) -> dict[str, int]:
    return {} if table.window is None else {"window_size_left": table.window, "window_size_right": 0}


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    cu_q, cu_k = table.cu_seqlens(q.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, table.max_query, table.max_key, 0.0, table.causal, False, scale=scale, **_window(table)
    )
    return out, (lse,)


def _torch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> Gradients:
    cu_q, cu_k = table.cu_seqlens(q.device)
    sizes, no_dropout = (table.max_query, table.max_key), torch.empty(0, dtype=torch.int64, device=q.device)
    inputs = grad, q, k, v, out, saved[0], cu_q, cu_k, *sizes, 0.0, table.causal, no_dropout, no_dropout
    return torch.ops.aten._flash_attention_backward(*inputs, scale=scale, **_window(table))


def _torch_obstacle(case: AttentionCase) -> str | None:
    if problem := needs_half_precision_on_a_gpu(case):
        return problem
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "it needs a GPU of compute capability 8.0 or newer"


@functools.cache
def _flash_attn() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def _lengths(table: SegmentTable, q: Tensor) -> dict[str, Any]:
    cu_q, cu_k = table.cu_seqlens(q.device)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": table.max_query, "max_seqlen_k": table.max_key}


def _backward_by(run: Callable[..., Any], grad: Tensor, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Gradients:
    """Run the backward of a package, which writes gradients where it is told, given q, k, v, output and log-sum-exp."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3])
    options |= {"dq": dq, "dk": dk, "dv": dv, "deterministic": torch.are_deterministic_algorithms_enabled()}
    run(grad.contiguous(), *inputs, **options)
    return dq, dk, dv


def _package_options(table: SegmentTable, q: Tensor, scale: float) -> dict[str, Any]:
    return _lengths(table, q) | {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": table.causal,
        "window_size_left": -1 if table.window is None else table.window,
        "window_size_right": -1 if table.window is None else 0,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _package_forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    out, lse, *_ = _flash_attn()._flash_attn_varlen_forward(q, k, v, **_package_options(table, q, scale))
    return out, (lse,)


def _package_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> Gradients:
    run, options = _flash_attn()._flash_attn_varlen_backward, _package_options(table, q, scale)
    return _backward_by(run, grad, (q, k, v, out, saved[0]), options)


def _package_obstacle(case: AttentionCase) -> str | None:
    if problem := needs_half_precision_on_a_gpu(case):
        return problem
    try:
        _flash_attn()
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash-attn cannot be imported ({error}): pip install flash-attn --no-build-isolation"
    return None  # one before 2.7 takes other arguments and fails its proof; newer ones are torch operators, which hide theirs


@functools.cache
def _flash_attn_3() -> Any:
    import flash_attn_interface  # the module that the package flash-attn-3 installs

    return flash_attn_interface


def _hopper_options(table: SegmentTable, q: Tensor, scale: float) -> dict[str, Any]:
    return _lengths(table, q) | {"softmax_scale": scale} | _window(table)


def _hopper_forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    out, lse, *_ = _flash_attn_3()._flash_attn_forward(q, k, v, causal=table.causal, **_hopper_options(table, q, scale))
    return out, (lse,)


def _hopper_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> Gradients:
    run, options = _flash_attn_3()._flash_attn_backward, _hopper_options(table, q, scale) | {"is_causal": table.causal}
    return _backward_by(run, grad, (q, k, v, out, saved[0]), options)


def _hopper_obstacle(case: AttentionCase) -> str | None:
    if problem := needs_half_precision_on_a_gpu(case):
        return problem
    try:
        _flash_attn_3()
    except (ImportError, OSError, RuntimeError) as error:
        where = "python setup.py install in the folder hopper of github.com/Dao-AILab/flash-attention"
        return f"flash-attn-3 cannot be imported ({error}): {where}"
    # One before November 2025 takes other arguments and fails its proof.
    return None if torch.cuda.get_device_capability()[0] == 9 else "it is for GPUs of compute capability 9.0 (Hopper)"


FLASH_ATTN_3 = Kernel("FlashAttention 3", _hopper_forward, _hopper_backward, _hopper_obstacle, rates=FLASH_3)
TORCH_FLASH = Kernel("FlashAttention of torch", _torch_forward, _torch_backward, _torch_obstacle, rates=FLASH_2)
FLASH_ATTN = Kernel("flash-attn", _package_forward, _package_backward, _package_obstacle, rates=FLASH_2)
