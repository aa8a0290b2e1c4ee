"""Selection of the core attention kernel: the first of a preference list that supports the case and passes verification.

A fused kernel is verified once per case, before it is used, so that a library whose interface has changed cannot corrupt
results: on a small chunk with a prefix and packed sequences its output and gradients must equal exact attention's within a
tolerance, with all key heads at once in backward and with one at a time. Rank 0 logs the kernel chosen, and so does every rank
on which one fails. `tests/support/runtime/kernel_proofs.py` proves all kernels of a machine against torch's own attention in
fp64.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pkgutil import resolve_name

import torch
from torch import Tensor

from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.runtime.attention.kernels.base import AttentionCase, Kernel, add_sinks, backward_by_heads, of_narrow_values
from megatron_epp.runtime.attention.kernels.exact import EXACT_ATTENTION
from megatron_epp.runtime.attention.segments import SegmentTable, Tensors

__all__ = ["EXACT_ATTENTION", "PREFERENCES", "AttentionCase", "Kernel", "choose", "explain", "kernels_of"]

logger = logging.getLogger(__name__)

_EXACT = ("exact:EXACT_ATTENTION",)
_CUDNN = ("transformer_engine:TRANSFORMER_ENGINE",)
_FLASH = "flash:FLASH_ATTN_3", "flash:FLASH_ATTN", "flash:TORCH_FLASH"
PREFERENCES = {"auto": _CUDNN + _FLASH + _EXACT, "fused": _CUDNN, "flash": _FLASH, "unfused": _EXACT, "local": _EXACT}
"""Kernels to try on a GPU, in order, by the value of Megatron's `--attention-backend`, which alone chooses among these lists: a
file of this folder and a name in it, imported when it is tried.

cuDNN goes before FlashAttention 3, as in Transformer Engine's own choice on Hopper. `flash` asks for FlashAttention 3 by name,
which builds no plans for new shapes.
"""

_SAMPLE = SegmentTable.build(Chunk((Segment(0, 70, 133), Segment(1, 0, 1), Segment(2, 0, 40))), 104)
"""Layout for verification: a slice behind a prefix, one token, and a packed sequence; no length is a multiple of a tile."""
_SAMPLE_WINDOW = 33
"""Window of the verification: shorter than the sample's prefix and than its segments, and no multiple of a tile."""
_TOLERANCE = 2e-2
"""Largest relative error, in norms, that a kernel may have against exact attention: bf16 has 8 significant bits."""


def kernels_of(preference: str) -> Iterator[Kernel]:
    """Yield the kernels of `PREFERENCES[preference]`, each imported when it is asked for."""
    yield from (resolve_name(f"{__name__}.{target}") for target in PREFERENCES[preference])


def choose(
    q: Tensor, k: Tensor, v: Tensor, preference: str = "auto", *, has_window: bool = False, has_sinks: bool = False
) -> Kernel:
    """Return the kernel for these shapes, type and device. Raises `EppError` if none of `PREFERENCES[preference]` can serve."""
    return _choose(case_of(q, k, v)._replace(has_window=has_window, has_sinks=has_sinks), preference)


def case_of(q: Tensor, k: Tensor, v: Tensor) -> AttentionCase:
    value_channels = v.shape[2] if v.shape[2] != k.shape[2] else 0
    return AttentionCase(q.device.type, q.dtype, q.shape[2], q.shape[1], k.shape[1], value_channels)


@functools.cache
def _choose(case: AttentionCase, preference: str) -> Kernel:
    chosen, obstacles = explain(case, preference)
    if chosen is None:
        raise EppError(f"--attention-backend {preference}: {'; '.join(obstacles)}. Leave it at auto")
    rank = os.environ.get("RANK", "0")
    failed = any(k.obstacle(case) is None for k in takewhile(lambda k: k is not chosen, _candidates(case, preference)))
    if case.device == "cuda" and (rank == "0" or failed):
        passed_over = f" ({'; '.join(obstacles)})" if obstacles else ""
        level = logging.WARNING if failed else logging.INFO
        text = "rank %s: attention in %s with %d channels: %s%s"
        logger.log(level, text, rank, case.dtype, case.channels, chosen.name, passed_over)
    return chosen


def explain(case: AttentionCase, preference: str = "auto") -> tuple[Kernel | None, list[str]]:
    """Return the kernel for a case, or None, and for each kernel preferred to it the reason why it cannot be used.

    Running out of memory is not such a reason: `torch.OutOfMemoryError` is raised.
    """
    obstacles: list[str] = []
    for kernel in _candidates(case, preference):
        obstacle = kernel.obstacle(case)
        if obstacle is None and kernel is not EXACT_ATTENTION:
            obstacle = failed_verification(kernel, case)
        if obstacle is None:
            return kernel, obstacles
        obstacles.append(f"{kernel.name}: {obstacle}")
    return None, obstacles


def _candidates(case: AttentionCase, preference: str) -> Iterator[Kernel]:
    if case.device != "cuda":
        yield EXACT_ATTENTION
        return
    for kernel in kernels_of(preference):  # fused ones take values as wide as keys
        yield of_narrow_values(kernel) if case.value_channels and kernel is not EXACT_ATTENTION else kernel


def failed_verification(
    kernel: Kernel, case: AttentionCase, exact: Kernel = EXACT_ATTENTION, table: SegmentTable = _SAMPLE
) -> str | None:
    """Return why a kernel fails verification against an exact one; None if it passes."""
    try:
        difference = _relative_error(kernel, case, exact, table)
    except torch.OutOfMemoryError:  # tells nothing of the kernel, which is asked again when there is room
        raise
    except Exception as error:  # libraries raise what they like where a build or a device does not suit them
        return f"it fails ({type(error).__name__}: {error})"
    return None if difference <= _TOLERANCE else f"its results are {difference:.1%} from exact ones"


@torch.no_grad()
def _relative_error(
    kernel: Kernel, case: AttentionCase, exact: Kernel = EXACT_ATTENTION, table: SegmentTable = _SAMPLE
) -> float:
    """Return the largest relative error of any result, in norms: ``|found - exact| / |exact|``. NaN if a result holds NaN."""
    table = replace(table, window=_SAMPLE_WINDOW if case.has_window else None)
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int, channels: int = case.channels) -> Tensor:
        return torch.randn(tokens, heads, channels, generator=generator).to(case.device, case.dtype)

    values, keys = case.value_channels or case.channels, sum(call.key_starts[-1] for call in table.calls)
    q, grad = random(table.num_tokens, case.query_heads), random(table.num_tokens, case.query_heads, values)
    k, v = random(keys, case.kv_heads), random(keys, case.kv_heads, values)
    scale = case.channels**-0.5
    sinks = torch.randn(case.query_heads, generator=generator).to(case.device)

    def results(kernel: Kernel, *inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield outputs and gradients: backward with all key heads at once, then, if there are several, one head at a time."""
        grad, q, k, v = inputs
        out, saved = kernel.forward(q, k, v, table, scale)
        if case.has_sinks:
            add_sinks(out, kernel.log_sums(saved), sinks)
        for count in sorted({case.kv_heads, 1}, reverse=True):
            groups: list[Tensors] = []

            def take(dk: Tensor, dv: Tensor, heads: slice | None, groups: list[Tensors] = groups) -> Tensors:
                groups.append((dk, dv))
                return dk[: len(q)], dv[: len(q)]

            dq, *_ = backward_by_heads(kernel, grad, q, k, v, out, saved, table, scale, take, count)
            yield out, dq, *(torch.cat(each, 1) for each in zip(*groups, strict=True))

    wanted = next(results(exact, *(x.float() for x in (grad, q, k, v))))
    passes = results(kernel, grad, q, k, v)
    errors = [(a.float() - b).norm() / b.norm() for each in passes for a, b in zip(each, wanted, strict=True)]
    return float(torch.stack(errors).max())  # of floats, max would leave one out that is not a number
