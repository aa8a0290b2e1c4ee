"""Which kernel core attention runs on: the first of a preference that can serve the case here and proves itself.

A fused kernel proves itself once per case, before it is used: on a small chunk with a prefix and packed sequences its output
and gradients must be those of exact attention, with all key heads at once in backward and with one after the other. So a
library whose interface has changed cannot do harm. The log of rank 0 says which it is, and that of every rank on which a kernel
fails to prove itself: one machine may differ from the others.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from itertools import takewhile

import torch
from torch import Tensor

from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.runtime.attention.kernels import by_heads
from megatron_epp.runtime.attention.kernels.base import Case, Kernel
from megatron_epp.runtime.attention.kernels.exact import EXACT
from megatron_epp.runtime.attention.kernels.flash import FLASH_ATTN, TORCH_FLASH
from megatron_epp.runtime.attention.kernels.transformer_engine import TRANSFORMER_ENGINE
from megatron_epp.runtime.attention.segments import SegmentTable

__all__ = ["EXACT", "FLASH_ATTN", "TORCH_FLASH", "TRANSFORMER_ENGINE", "PREFERENCES", "Case", "Kernel", "choose", "explain"]

logger = logging.getLogger(__name__)

PREFERENCES: dict[str, tuple[Kernel, ...]] = {
    "auto": (TRANSFORMER_ENGINE, FLASH_ATTN, TORCH_FLASH, EXACT),
    "fused": (TRANSFORMER_ENGINE,),
    "flash": (FLASH_ATTN, TORCH_FLASH),
    "unfused": (EXACT,),
    "local": (EXACT,),
}
"""On a GPU, by what Megatron's `--attention-backend` names."""

type Pair = tuple[Tensor, Tensor]

_PROOF = Chunk((Segment(0, 70, 133), Segment(1, 0, 1), Segment(2, 0, 40)))
_TOLERANCE = 2e-2
"""Largest norm of a difference over the norm of what is exact: bf16 has 8 bits."""


def choose(q: Tensor, k: Tensor, preference: str = "auto") -> Kernel:
    """The kernel for such queries and keys.

    Args:
        q: ``[tokens, query_heads, channels]``.
        k: ``[keys, kv_heads, channels]``.
        preference: a key of `PREFERENCES`.

    Raises:
        EppError: none of the preference can serve.
    """
    return _choose(Case(q.device.type, q.dtype, q.shape[2], q.shape[1], k.shape[1]), preference)


@functools.cache
def _choose(case: Case, preference: str) -> Kernel:
    chosen, obstacles = explain(case, preference)
    if chosen is None:
        raise EppError(f"--attention-backend {preference}: {'; '.join(obstacles)}. Leave it at auto")
    rank = os.environ.get("RANK", "0")
    failed = any(k.obstacle(case) is None for k in takewhile(lambda k: k is not chosen, PREFERENCES[preference]))
    if case.device == "cuda" and (rank == "0" or failed):
        passed_over = f" ({'; '.join(obstacles)})" if obstacles else ""
        level = logging.WARNING if failed else logging.INFO
        text = "rank %s: attention in %s with %d channels: %s%s"
        logger.log(level, text, rank, case.dtype, case.channels, chosen.name, passed_over)
    return chosen


def explain(case: Case, preference: str = "auto") -> tuple[Kernel | None, list[str]]:
    """The kernel for a case, or None, and why those preferred to it are not it. Memory that runs out is nobody's fault: that is
    raised.
    """
    obstacles = []
    for kernel in PREFERENCES[preference] if case.device == "cuda" else (EXACT,):
        obstacle = kernel.obstacle(case) or _failure(kernel, case)
        if obstacle is None:
            return kernel, obstacles
        obstacles.append(f"{kernel.name}: {obstacle}")
    return None, obstacles


def _failure(kernel: Kernel, case: Case) -> str | None:
    """What is wrong with a kernel's results; None for exact attention itself."""
    if kernel is EXACT:
        return None
    try:
        apart = _apart(kernel, case)
    except torch.OutOfMemoryError:  # tells nothing of the kernel, which is asked again when there is room
        raise
    except Exception as error:  # libraries raise what they like where a build or a device does not suit them
        return f"it fails ({type(error).__name__}: {error})"
    return None if apart <= _TOLERANCE else f"its results are {apart:.1%} from exact ones"


@torch.no_grad()
def _apart(kernel: Kernel, case: Case) -> float:
    """The largest norm of a difference over the norm of what is exact; not a number where a result is none."""
    table = SegmentTable.build(_PROOF, _PROOF.num_tokens)
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, case.channels, generator=generator).to(case.device, case.dtype)

    q, grad = (random(table.num_tokens, case.query_heads) for _ in range(2))
    k, v = (random(table.key_starts[-1], case.kv_heads) for _ in range(2))
    scale = case.channels**-0.5

    def results(kernel: Kernel, *inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """With all key heads at once in the backward, and where there are more than one with one at a time."""
        grad, q, k, v = inputs
        out, saved = kernel.forward(q, k, v, table, scale)
        for count in sorted({case.kv_heads, 1}, reverse=True):
            groups: list[Pair] = []

            def take(dk: Tensor, dv: Tensor, heads: slice | None, groups: list[Pair] = groups) -> Pair:
                groups.append((dk, dv))
                return dk[: len(q)], dv[: len(q)]

            dq, *_ = by_heads.backward(kernel, grad, q, k, v, out, saved, table, scale, take, count)
            yield out, dq, *(torch.cat(each, 1) for each in zip(*groups, strict=True))

    exact = next(results(EXACT, *(x.float() for x in (grad, q, k, v))))
    found = results(kernel, grad, q, k, v)
    apart = [(a.float() - b).norm() / b.norm() for each in found for a, b in zip(each, exact, strict=True)]
    return float(torch.stack(apart).max())  # of floats, max would leave one out that is not a number
