"""Casts to FP8 and back by the recipes that keep no state, in plain torch, into the tensors of Transformer Engine's Python.

Bytes and scales are where the compiled functions put them: by rows for products along the last dimension, by columns for those
along tokens. Scales are not swizzled.
"""

import collections
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

E4M3, E5M2 = 7, 8
"""Numbers of the two types, as in `extension.DType`."""
_TYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
casts_by: collections.Counter[str] = collections.Counter()
"""Number of casts that this process has made, by the quantizer's class."""
_TENSORWISE, _BLOCKWISE, _MXFP8 = "Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer"


def cast(x: Tensor, quantizer: Any, out: Any = None) -> Any:
    """Return a tensor cast by a quantizer, or write it into another that it has cast."""
    kind = type(quantizer).__name__
    if kind not in (_TENSORWISE, _BLOCKWISE, _MXFP8):
        raise NotImplementedError(f"casts by {kind} need a GPU")
    casts_by[kind] += 1
    parts = (_tensorwise if kind == _TENSORWISE else _by_blocks)(x.detach(), quantizer)
    if out is None:
        return _made_of(parts, quantizer, x.shape, x.dtype)
    for name, part in parts.items():
        getattr(out, name).copy_(part)
    return out


def empty(quantizer: Any, shape: torch.Size, kind: torch.dtype) -> Any:
    """Return a tensor for casts that others have made, such as those that ranks gather."""
    parts = {name: torch.empty(size, dtype=of) for name, (size, of) in quantizer.inner_tensor_specs(shape).items()}
    return _made_of(parts, quantizer, shape, kind)


def _made_of(parts: dict[str, Tensor], quantizer: Any, shape: torch.Size, kind: torch.dtype) -> Any:
    context = quantizer.create_metadata(shape, dtype=kind)
    return context["cls"].__tensor_unflatten__(parts, context, shape, None)


def values(x: Any, along_tokens: bool = False) -> Tensor:
    """Return what a tensor stands for, in fp32 if it has been cast, by its columns if products go along tokens."""
    if not hasattr(x, "_fp8_dtype"):
        return x
    kind = _TYPES[int(x._fp8_dtype)]
    if hasattr(x, "_scale_inv"):
        data = x._data if x._data is not None else x._transpose.movedim(0, -1)
        return data.view(kind).float() * x._scale_inv
    side = "columnwise" if along_tokens else "rowwise"
    data, scales = getattr(x, f"_{side}_data"), getattr(x, f"_{side}_scale_inv")
    is_mxfp8 = hasattr(x, "_with_gemm_swizzled_scales")
    if along_tokens and not is_mxfp8:  # lies as its transpose
        data = data.movedim(0, -1)
    matrix = data.flatten(0, -2).view(kind).float()
    if is_mxfp8:
        of_blocks, lengths = torch.exp2(scales.float() - 127), (32, 1) if along_tokens else (1, 32)
    else:
        of_blocks, lengths = scales, (128, 128) if x._is_2D_scaled else ((128, 1) if along_tokens else (1, 128))
        if x._is_2D_scaled == along_tokens:
            of_blocks = of_blocks.t()
    return (matrix * _spread(of_blocks, lengths, matrix.shape)).view(data.shape)


def _tensorwise(x: Tensor, quantizer: Any) -> dict[str, Tensor]:
    amax = x.float().abs().max()
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
    kind = _TYPES[int(quantizer.dtype)]
    scale = torch.finfo(kind).max / amax if amax > 0 else torch.ones_like(amax)
    data = (x.float() * scale).clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind).view(torch.uint8)
    parts = {"_data": data, "_transpose": data.movedim(-1, 0).contiguous(), "_scale_inv": (1 / scale).view(1)}
    return {name: parts[name] for name in quantizer.inner_tensor_specs(x.shape)}


def _by_blocks(x: Tensor, quantizer: Any) -> dict[str, Tensor]:
    is_mxfp8, matrix = type(quantizer).__name__ == _MXFP8, x.float().flatten(0, -2)
    length = 32 if is_mxfp8 else quantizer.block_len
    parts = {}
    for side, along_tokens in (("rowwise", False), ("columnwise", True)):
        is_square = not is_mxfp8 and quantizer.block_scaling_dim == 2
        lengths = (length, length) if is_square else ((length, 1) if along_tokens else (1, length))
        kind = _TYPES[int(quantizer.dtype)]
        exponents = _exponents(matrix, lengths, torch.finfo(kind).max)
        data = (matrix * torch.exp2(_spread(exponents, lengths, matrix.shape))).to(kind).view(torch.uint8).view(x.shape)
        if along_tokens and not is_mxfp8:
            data = data.movedim(-1, 0).contiguous()
        scales = (127 - exponents).to(torch.uint8) if is_mxfp8 else torch.exp2(-exponents)
        if not is_mxfp8 and is_square == along_tokens:
            scales = scales.t()
        parts |= {f"_{side}_data": data, f"_{side}_scale_inv": scales}
    filled = {}
    for name, (shape, _) in quantizer.inner_tensor_specs(x.shape).items():
        part = parts[name]
        if part.shape != shape:  # scales are padded
            padded = part.new_zeros(shape)
            padded[: part.shape[0], : part.shape[1]] = part
            part = padded
        filled[name] = part
    return filled


def _exponents(matrix: Tensor, lengths: tuple[int, int], most: float) -> Tensor:
    """Return by which powers of two blocks are multiplied, so that none exceeds `most`."""
    rows, columns = (math.ceil(size / length) for size, length in zip(matrix.shape, lengths, strict=True))
    padded = matrix.new_zeros(rows * lengths[0], columns * lengths[1])
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.abs()
    amax = padded.view(rows, lengths[0], columns, lengths[1]).amax((1, 3))
    return torch.where(amax > 0, torch.floor(torch.log2(most / amax)), 0.0)


def _spread(blocks: Tensor, lengths: tuple[int, int], shape: torch.Size) -> Tensor:
    return blocks.repeat_interleave(lengths[0], 0).repeat_interleave(lengths[1], 1)[: shape[0], : shape[1]]
