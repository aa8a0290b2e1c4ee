"""Offsets of a chunk's segments among its queries and its keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_epp.plan import Chunk, Segment


@dataclass(frozen=True)
class SegmentTable:
    """Offsets of the segments of one chunk, for one variable-length attention call.

    Attributes:
        segments: the chunk's segments, then one for the padding (sequence -1) when there is any.
        query_starts: ``[n + 1]`` offsets among the chunk's tokens (``cu_seqlens_q``).
        key_starts: ``[n + 1]`` offsets among the keys (``cu_seqlens_k``); a slice's keys include its prefix.
    """

    segments: tuple[Segment, ...]
    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @cached_property
    def max_query(self) -> int:
        return max(s.num_tokens for s in self.segments)

    @cached_property
    def max_key(self) -> int:
        return max(s.end for s in self.segments)

    def part(self, shard: Iterable[slice]) -> tuple[Segment, ...]:
        """Return the pieces of segments that a rank has, in order, where ranks share the chunk's tokens.

        Args:
            shard: the rank's tokens (`ContextParallel.shard`).
        """
        starts = list(zip(self.segments, self.query_starts, self.query_starts[1:], strict=False))
        pieces = []
        for own in shard:
            for (sequence, first, _), at, end in starts:
                low, high = max(at, own.start), min(end, own.stop)
                if low < high:
                    pieces.append(Segment(sequence, first + low - at, first + high - at))
        return tuple(pieces)

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Query and key offsets, int32 ``[n + 1]`` each on `device`: copied there once, for all layers."""
        if device not in self._on_device:
            starts = torch.tensor([self.query_starts, self.key_starts], dtype=torch.int32)
            if device.type == "cuda":
                starts = starts.pin_memory().to(device, non_blocking=True)
            self._on_device[device] = starts
        queries, keys = self._on_device[device]
        return queries, keys

    @cached_property
    def _on_device(self) -> dict[torch.device, Tensor]:
        return {}

    @staticmethod
    def build(chunk: Chunk, padded_tokens: int) -> SegmentTable:
        """Lay out a chunk whose token count was padded to `padded_tokens`."""
        segments = list(chunk.segments)
        padding = padded_tokens - chunk.num_tokens
        if padding > 0:  # attends to itself only, so that nothing of it reaches the others
            segments.append(Segment(-1, 0, padding))
        query_starts, key_starts = [0], [0]
        for segment in segments:
            query_starts.append(query_starts[-1] + segment.num_tokens)
            key_starts.append(key_starts[-1] + segment.end)
        return SegmentTable(tuple(segments), tuple(query_starts), tuple(key_starts))
