"""Interface and helpers shared by all attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.runtime.attention.segments import SegmentTable

type Saved = tuple[Tensor, ...]
"""Tensors a forward saves for its backward in addition to q, k, v and output, the log-sum-exp first."""
type Forward = Callable[[Tensor, Tensor, Tensor, SegmentTable, float], tuple[Tensor, Saved]]
type Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Saved, SegmentTable, float], tuple[Tensor, Tensor, Tensor]]


class Case(NamedTuple):
    """Properties on which the choice of a kernel depends: those of the tensors, not of the chunk.

    Attributes:
        device: ``cuda`` or ``cpu``.
        dtype: of queries, keys and values.
        channels: of a head.
        query_heads: of this rank.
        kv_heads: of this rank.
    """

    device: str
    dtype: torch.dtype
    channels: int
    query_heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """Causal variable-length attention of a chunk's segments against their own prefixes, in one call for all of them.

    Queries are ``[tokens, query_heads, channels]``, keys and values ``[keys, kv_heads, channels]``, where segment i owns
    ``keys[key_starts[i]:key_starts[i + 1]]``. The mask is aligned to the bottom right: the last query of a segment sees all of
    its keys.

    Attributes:
        name: for people.
        of_heads: selects, from the tensors saved by a forward of all heads, those for a backward of some query heads.
        forward: of ``(q, k, v, table, scale)``; returns the output, like the queries, and what backward needs.
        backward: of ``(grad, q, k, v, out, saved, table, scale)``; returns the gradients of q, k and v, those of k and v over
            the prefixes too.
        obstacle: why it cannot be used for a case here, or None.
    """

    name: str
    forward: Forward
    backward: Backward
    obstacle: Callable[[Case], str | None]
    of_heads: Callable[[Saved, slice], Saved] = lambda saved, own: (log_sums_of(saved[0], own),)


def log_sums_of(log_sums: Tensor, own: slice) -> Tensor:
    """Select heads of a log-sum-exp.

    Args:
        log_sums: ``[heads, tokens]``, or in older releases of FlashAttention ``[sequences, heads, longest]``.
        own: the heads.
    """
    return log_sums[own] if log_sums.dim() == 2 else log_sums[:, own].contiguous()


def needs_half_precision_on_a_gpu(case: Case, most_channels: int = 256) -> str | None:
    """Return why no fused kernel can be used for a case, or None: limits that all of them share."""
    if case.device != "cuda":
        return "it runs on GPUs"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return "it runs in bf16 and fp16"
    if case.channels > most_channels or case.channels % 8 != 0:
        return f"heads of {case.channels} channels: it takes multiples of 8 up to {most_channels}"
    return None
