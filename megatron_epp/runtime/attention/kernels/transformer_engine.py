"""cuDNN's fused attention, through Transformer Engine 2."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan.flags import CUDNN
from megatron_epp.runtime.attention.kernels.base import AttentionCase, Kernel, Saved, needs_half_precision_on_a_gpu
from megatron_epp.runtime.attention.segments import SegmentTable

_LAYOUT, _FORMAT = "thd_thd_thd", "thd"
_LEAST_CUDNN = 90600
"""cuDNN 9.6, from which plans are for classes of sums of tokens, not for lengths as they are."""
_REFUSED_CUDNN = range(91000, 91002)
"""cuDNN 9.10.0 and 9.10.1, which Transformer Engine refuses for packed sequences."""
_LENGTH_MULTIPLE = 64
"""Multiple of the largest lengths with which Transformer Engine chooses cuDNN 9.6 too. They decide nothing else: what tokens a
segment has is in the offsets."""


@functools.cache
def _fused() -> Any:
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    """Return the random generator of this kernel on a device.

    A forward advances its generator even without dropout. With torch's default generator, a layer recomputed without its
    attention would therefore draw another hidden dropout than the first time.
    """
    return torch.Generator(device)


def _options(function: Callable[..., Any], table: SegmentTable, q: Tensor, scale: float) -> dict[str, Any]:
    """Arguments that forward and backward share, as far as this release has them; empty segments are added to fit a class."""
    cu_q, cu_k = table.cu_seqlens(q.device, table.shape_class.segments)
    types = {theirs: ours for ours, theirs in _fused().TORCH_DType.items()}
    wanted = {
        "max_seqlen_q": _rounded_up(table.max_query),
        "max_seqlen_kv": _rounded_up(table.max_key),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_k,
        "cu_seqlens_q_padded": cu_q,  # offsets: nothing lies between the segments
        "cu_seqlens_kv_padded": cu_k,
        "fake_dtype": q.dtype,
        "dqkv_dtype": types[q.dtype],  # before 2.15, of backward
        "rng_gen": _generator(q.device),
        "fused_attention_backend": _fused().FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": scale,
        "dropout": 0.0,
        "qkv_layout": _LAYOUT,
        "dqkv_layout": _LAYOUT,
        "o_format": _FORMAT,
        "do_format": _FORMAT,
        "attn_bias_type": "no_bias",
        "attn_mask_type": "padding_causal_bottom_right" if table.causal else "padding",
        "window_size": (-1 if table.window is None else table.window, 0 if table.causal else -1),
        "bottom_right_diagonal": table.causal,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return {name: value for name, value in wanted.items() if name in _parameters(function)}


def _rounded_up(length: int) -> int:
    return -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def _forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
    function = _fused().fused_attn_fwd
    out, saved, *_ = function(is_training=True, q=q, k=k, v=v, **_options(function, table, q, scale))
    return out, tuple(saved)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    function = _fused().fused_attn_bwd
    inputs = {"q": q, "k": k, "v": v, "o": out, "d_o": grad}
    tensors = {name: x.contiguous() for name, x in inputs.items()} | {"aux_ctx_tensors": list(saved)}  # it sees no strides
    dq, dk, dv, *_ = function(**tensors, **_options(function, table, q, scale))
    return dq, dk, dv


def _of_heads(saved: Saved, own: slice, tokens: slice | Tensor = slice(None)) -> Saved:
    """Select heads of the saved log-sum-exp, ``[tokens, heads, 1]``; the saved generator state that follows it is kept."""
    return saved[0][tokens, own].contiguous(), *saved[1:]


def _obstacle(case: AttentionCase) -> str | None:
    if problem := needs_half_precision_on_a_gpu(case):
        return problem
    if os.environ.get("NVTE_FUSED_ATTN", "1") == "0":
        return "NVTE_FUSED_ATTN is 0"
    try:
        fused = _fused()
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine cannot be imported ({error}): pip install 'megatron-epp[te]'"
    if "fake_dtype" not in _parameters(fused.fused_attn_fwd):
        return "this Transformer Engine is too old: version 2 is needed"
    # Segments of different lengths without padding between them.
    if (capability := torch.cuda.get_device_capability()) < (9, 0):
        return "cuDNN packs sequences on compute capability 9.0 and newer"
    if capability == (12, 0):
        return "on compute capability 12.0 it builds a plan for every chunk"
    version = torch.backends.cudnn.version()
    if version in _REFUSED_CUDNN:
        return f"Transformer Engine refuses cuDNN {version} (9.10.0 and 9.10.1) for packed sequences: 9.10.2 is needed"
    return f"cuDNN {version} builds a plan for every chunk: 9.6 is needed" if version and version < _LEAST_CUDNN else None


TRANSFORMER_ENGINE = Kernel(
    *("cuDNN through Transformer Engine", _forward, _backward, _obstacle, _of_heads),
    log_sums=lambda saved: saved[0].squeeze(-1).t(),
    builds_plans=True,
    rates=CUDNN,
)
