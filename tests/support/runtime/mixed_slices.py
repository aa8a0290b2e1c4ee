"""A sequence cut into slices next to packed ones, and layers on them compared with the same layers on each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from megatron_epp.runtime.context import ChunkContext

LENGTHS = {0: 23, 1: 6, 2: 1, 3: 9}
"""Tokens of sequences by number; the first is cut."""
CUTS = ((0, 8), (8, 9), (9, 11), (11, 23))
PADDING = 2
_COMPANY = {0: (), 1: ((1, 0, 6),), 2: (), 3: ((2, 0, 1), (3, 0, 9))}
"""Segments of packed sequences behind each slice."""


def context_of(chunk: Chunk, kv_cache: SlicedKVCache, *, forward_only: bool = False) -> ChunkContext:
    part, length = chunk.slice_of(tuple(LENGTHS.values())), LENGTHS[0]
    view = None if part is None else SliceView(*part, length, 2 * length, len(CUTS))
    if view is not None and view.is_last_slice:
        view = replace(view, capacity=view.start + chunk.num_tokens + PADDING)
    table = SegmentTable.build(chunk, chunk.num_tokens + PADDING)
    return ChunkContext(0, table, kv_cache, view, forward_only=forward_only)


def tokens_of(chunk: Chunk, sequences: dict[int, Tensor]) -> Tensor:
    parts = [sequences[number][start:end] for number, start, end in chunk.segments]
    return torch.cat([*parts, torch.ones_like(sequences[0][:PADDING])])


def check_slices(
    width: int,
    weights: dict[str, Tensor],
    whole: Callable[[int, Tensor], Tensor],
    run: Callable[[Chunk, Tensor, SlicedKVCache], Tensor],
    tolerance: float,
) -> None:
    """Compare outputs and gradients of a network on slices and packed sequences with those on each sequence by itself.

    Args:
        width: of a token.
        weights: of the network, all of which must get a gradient.
        whole: the network on a sequence, by its number.
        run: the network on a chunk.
        tolerance: relative and absolute, of gradients.
    """
    inputs = {q: torch.randn(n, width, dtype=torch.float64, requires_grad=True) for q, n in LENGTHS.items()}
    factors = {q: torch.randn_like(x) for q, x in inputs.items()}
    wanted = {q: whole(q, x) for q, x in inputs.items()}
    for q, out in wanted.items():
        (out * factors[q]).sum().backward()
    tensors = [*inputs.values(), *weights.values()]
    expected = _taken(tensors)

    chunks = [Chunk((Segment(0, *ends), *(Segment(*part) for part in _COMPANY[at]))) for at, ends in enumerate(CUTS)]
    kv_cache, outputs = SlicedKVCache(), []
    for chunk in chunks:
        outputs.append(run(chunk, tokens_of(chunk, inputs), kv_cache))
        sizes = [*(part.num_tokens for part in chunk.segments), PADDING]
        for (q, start, end), out in zip(chunk.segments, outputs[-1].split(sizes)[:-1], strict=True):
            torch.testing.assert_close(out, wanted[q][start:end], rtol=1e-12, atol=1e-12)
    for chunk in reversed(chunks):
        (outputs.pop()[:-PADDING] * tokens_of(chunk, factors)[:-PADDING]).sum().backward()
    kv_cache.assert_empty()
    for own, other in zip(_taken(tensors), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=1e-12)


def _taken(tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients, which all tensors must have, and leave none."""
    copies = [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]
    assert len(copies) == len(tensors)
    for tensor in tensors:
        tensor.grad = None
    return copies
