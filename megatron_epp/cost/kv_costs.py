"""Keys and values of sliced sequences, or their latents: time and memory of KV offload, and workspace of their gradients.

With KV offload they are in host memory and streamed to attention in *pieces*, groups of heads of one layer. While attention
runs on one piece, the next is loaded; in backward its gradient is loaded and stored too. Such copies cost only their excess
over attention's time; the load of a pass's first piece and the store of its last overlap with nothing. The device holds keys
and values of two pieces, and in backward the gradient of one. Gradients that attention's backward makes before they are added
to that are counted with the layer (`KVBytes.prefix_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.work import ChunkWork, IntColumn, LinearTime, TimeColumn
from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.sizing import MOST_ROUNDED_SLICES, all_at_once, size_classes, transient_kv_gradient_bytes


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Keys and values of one layer that caches them, or latents of which attention makes them."""

    bytes_per_token: float  # of both, or of the latents
    gradient_bytes_per_token: float | None = None  # of their gradient while it is accumulated; None if it takes as much
    # For sequences with more slices than `sizing.MOST_ROUNDED_SLICES`; None for the same
    many_gradient_bytes_per_token: float | None = None
    heads: int = 1  # of keys and values that a rank has inside attention; 1 if unknown
    queries_per_key: int = 1  # query heads that share one of them
    # Of keys and values that attention makes of latents, in `expanded_heads` of a rank; else 0
    expanded_bytes_per_token: float = 0.0
    expanded_heads: int = 0

    def gradient_per_token(self, work: ChunkWork) -> TimeColumn:
        """Bytes per token of their gradient while it is accumulated, for each chunk's sequence."""
        few = self.bytes_per_token if self.gradient_bytes_per_token is None else self.gradient_bytes_per_token
        many = few if self.many_gradient_bytes_per_token is None else self.many_gradient_bytes_per_token
        return np.where(work.num_slices > MOST_ROUNDED_SLICES, many, few)

    def prefix_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes of new gradients of a prefix's keys and values, before they are added to the sums.

        Kernels are assumed to make them for each query head if key heads are shared, as all do, and in fp32, as the largest
        does. Gradients of the chunk's own tokens are in `BlockCosts.working_bytes_per_token`.
        """
        head, seen = self.bytes_per_token / self.heads, work.prefix_tokens + work.tokens
        # Where all heads run at once and the sums are no wider, what the last slice makes becomes them, and counts there.
        wider = self.gradient_per_token(work) > self.bytes_per_token
        if self.expanded_heads:
            head = 2 * self.expanded_bytes_per_token / self.expanded_heads
            becomes = work.last & all_at_once(seen, self.expanded_heads, head, 1) & ~wider
            return self._expanded_bytes(seen) / 2 + np.where(becomes, 0.0, 2 * self.bytes_per_token * seen)  # sums in fp32

        def transient(keys: IntColumn, heads: int) -> TimeColumn:
            return transient_kv_gradient_bytes(keys, heads, head, self.queries_per_key)

        # Where rows are read once for several segments, gradients of two calls are put together
        seen = np.where(work.repeated_tokens > 0, 2 * (seen - work.repeated_tokens), seen)
        all_heads, piece = transient(seen, self.heads), transient(seen, self.heads // head_parts(self.heads))
        becomes = work.last & all_at_once(seen, self.heads, head, self.queries_per_key) & ~wider
        resident = all_heads - np.where(becomes, self.bytes_per_token * seen, 0.0)
        return np.maximum(np.where(work.kv_offload, piece, resident) - transient(work.tokens, self.heads), 0.0)

    def forward_bytes(self, work: ChunkWork) -> TimeColumn:
        """Bytes that a pass makes of latents at one time, a backward as many of their gradients, and rows put together."""
        seen = work.prefix_tokens + work.tokens
        gathered = self.bytes_per_token * (work.gathered_tokens + (work.repeated_tokens if self.expanded_heads else 0))
        return self._expanded_bytes(seen) / 2 + gathered if self.expanded_heads else gathered

    def _expanded_bytes(self, keys: IntColumn) -> TimeColumn:
        head_bytes = 2 * self.expanded_bytes_per_token / self.expanded_heads
        return transient_kv_gradient_bytes(keys, self.expanded_heads, head_bytes, 1)


NO_KV = KVBytes(bytes_per_token=0.0)


@dataclass(frozen=True, slots=True)
class KVOffloadCosts:
    """Time and memory of KV offload on one stage, as columns ``[chunk]``; 0 for chunks without a slice."""

    # forward_us, backward_us, again_us: time added to a pass, and to each layer that recomputes attention
    forward_us: TimeColumn
    backward_us: TimeColumn
    again_us: TimeColumn
    # forward_bytes, backward_bytes: device memory while a pass runs, in place of the caches
    forward_bytes: IntColumn
    backward_bytes: IntColumn
    # cache_bytes, gradient_bytes: host memory of the whole sequence
    cache_bytes: IntColumn
    gradient_bytes: IntColumn


CopyTime = Callable[[float | TimeColumn, IntColumn], TimeColumn]
"""Function from bytes per token and tokens to the microseconds of a one-way copy of keys and values or of their gradients."""


def kv_offload_costs(
    cached: KVBytes,
    layers: float,
    passes: tuple[LinearTime, LinearTime],
    work: ChunkWork,
    copy_us: CopyTime,
    fragmentation_share: float,
) -> KVOffloadCosts:
    """Compute what KV offload takes on a stage, given the times of a layer's forward and backward."""
    parts = head_parts(cached.heads)
    kv, gradient, pieces = cached.bytes_per_token / parts, cached.gradient_per_token(work) / parts, layers * parts
    forward_us, backward_us = (line.per_pair_us for line in passes)
    rows, before, upto = size_classes(work.cache_tokens), work.prefix_tokens, work.prefix_tokens + work.tokens
    has_earlier, has_later = np.where(work.first, 0, 1), np.where(work.last, 0, 1)

    def beyond(streamed_us: TimeColumn, per_pair_us: float, layers: float) -> TimeColumn:
        return np.where(work.sliced, np.maximum(streamed_us - layers * per_pair_us * work.pairs, 0.0), 0.0)

    in_us, out_us = has_earlier * copy_us(kv, before), copy_us(kv, work.tokens)
    back_us = copy_us(kv, upto) + has_later * copy_us(gradient, upto)
    sums_us = has_earlier * copy_us(gradient, before)  # on their way out
    device = 1.0 + fragmentation_share
    return KVOffloadCosts(
        forward_us=beyond(pieces * (in_us + out_us), forward_us, layers) + work.sliced * (in_us + out_us),
        backward_us=beyond(pieces * (back_us + sums_us), backward_us, layers) + work.sliced * (back_us + sums_us),
        again_us=beyond(parts * in_us, forward_us, 1),
        forward_bytes=_whole(work.sliced * 2 * kv * rows * device),
        backward_bytes=_whole(work.sliced * (2 * kv + gradient) * rows * device),
        cache_bytes=_whole(work.sliced * pieces * kv * rows),
        gradient_bytes=_whole(work.sliced * pieces * gradient * rows),
    )


def _whole(amount: TimeColumn) -> IntColumn:
    return np.ceil(amount).astype(np.int64)
