"""Layout of a chunk's attention: its segments among queries and keys, and its window on the cache of its sliced sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.plan.shape_classes import CallSize, ShapeClass, segment_class

if TYPE_CHECKING:
    from megatron_epp.runtime.handover import Stretches

type Tensors = tuple[Tensor, ...]
"""Cached tensors of some tokens, or their gradients: ``[tokens, heads, width]`` each.

The number of heads is the same in all of them, widths need not be. Where all query heads share what is cached (a latent), it is
one head, which cannot be split into groups.
"""


class HeadGroup(NamedTuple):
    """Group of heads of one layer, which attention processes at once."""

    layer: int
    part: int


class KVCacheError(EppError):
    """Error of a KV cache in a state that the plan rules out."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """Window of one chunk on the cache of its sliced sequence: the tokens ``[start, end)`` of `length`.

    The cache stores the slice. Of the sequence's last chunk it stores all tokens: tokens of other sequences lie after the
    sequence's end. Other tokens in the chunk of an earlier slice are *uncached*: they follow the slice in the buffer, where
    later slices overwrite them.

    The buffer holds `capacity` tokens: every chunk of the sequence fits after the start of its slice. For a last
    slice, the tokens that its chunk fills.
    """

    sequence: int
    start: int
    end: int
    length: int
    capacity: int
    num_slices: int = 2
    handed: Stretches | None = field(default=None, compare=False)  # the chunk's; None where its slices alone hand on states

    @property
    def is_last_slice(self) -> bool:
        return self.end == self.length

    @property
    def stop(self) -> int:
        """End of the rows of the buffer that the chunk fills (exclusive)."""
        return self.capacity if self.is_last_slice else self.end

    @property
    def num_cached(self) -> int:
        """Number of the chunk's tokens, from its first, that are stored in the buffer."""
        return self.stop - self.start

    def call(self, kernel: Any, table: SegmentTable, like: Tensors) -> tuple[SliceView, Any, SegmentTable]:
        """Return view, `Kernel` and layout of a layer's attention, whose queries, keys and values are like `like`."""
        return self, kernel, table


@dataclass(frozen=True)
class SegmentTable:
    """Offsets of the segments of one chunk, for one variable-length attention call."""

    segments: tuple[Segment, ...]  # the chunk's segments, then one for the padding (sequence -1) when there is any
    query_starts: tuple[int, ...]  # ``[n + 1]`` offsets among the chunk's tokens (``cu_seqlens_q``)
    key_starts: tuple[int, ...]  # ``[n + 1]`` offsets among the keys (``cu_seqlens_k``); a slice's keys include its prefix
    window: int | None = None  # tokens ahead of a query that it sees besides itself; None for all
    causal: bool = True  # False: every query of a segment sees all of its keys, which may be fewer than its queries
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _numbers: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _windows: dict[int, SegmentTable] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @property
    def calls(self) -> tuple[SegmentTable, ...]:
        """Layouts of the calls of a kernel's library that one call with this layout takes, and all keys of which it gets."""
        return (self,)

    @property
    def num_real(self) -> int:
        """Number of tokens without the padding."""
        return self.query_starts[-2] if self.segments[-1].sequence < 0 else self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.segments) - (self.segments[-1].sequence < 0)

    @cached_property
    def max_query(self) -> int:
        return max(s.num_tokens for s in self.segments)

    @cached_property
    def max_key(self) -> int:
        return max(s.end for s in self.segments)

    def part(self, shard: Iterable[slice]) -> tuple[Segment, ...]:
        """Return the pieces of segments that a rank with the tokens of `shard` (see `ContextParallel.shard`) has, in order."""
        starts = list(zip(self.segments, self.query_starts, self.query_starts[1:], strict=False))
        return tuple(
            Segment(sequence, first + low - at, first + high - at)
            for own in shard
            for (sequence, first, _), at, end in starts
            if (low := max(at, own.start)) < (high := min(end, own.stop))
        )

    @property
    def shape_class(self) -> ShapeClass:
        return CallSize(len(self.segments), self.num_tokens, self.key_starts[-1]).shape_class

    def cu_seqlens(self, device: torch.device, num_segments: int = 0) -> tuple[Tensor, Tensor]:
        """Query and key offsets, int32 ``[n + 1]`` each, copied there once for all layers unless `take` put them there.

        Empty segments are added up to `num_segments`, the class of their number.
        """
        if device not in self._on_device:
            offsets = offsets_of(self)
            self.take(device, offsets.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else offsets)
        end = max(num_segments, len(self.segments)) + 1
        queries, keys = self._on_device[device]
        return queries[:end], keys[:end]

    def take(self, device: torch.device, offsets: Tensor) -> None:
        """Use `offsets` of this table (`offsets_of`) that are on a device, or on their way there with what uses them."""
        self._on_device[device] = offsets

    def numbers(self, device: torch.device, first: int = 0) -> Tensor:
        """Number of each token's segment, from that of `first` on: int32 ``[tokens]``, made there once for all layers."""
        if (device, first) not in self._numbers:
            sizes = self.cu_seqlens(device)[0][first:].diff()
            each = torch.arange(len(sizes), dtype=torch.int32, device=device)
            num_tokens = self.num_tokens - self.query_starts[first]  # known here, so the host does not wait for the device
            self._numbers[device, first] = each.repeat_interleave(sizes, output_size=num_tokens)
        return self._numbers[device, first]

    def within(self, window: int) -> SegmentTable:
        """Return the layout in a layer with a window, where a segment's keys include no more of its prefix than the window."""
        if window not in self._windows:
            segments = tuple(Segment(s.sequence, (at := min(s.start, window)), at + s.num_tokens) for s in self.segments)
            key_starts = tuple(accumulate((segment.end for segment in segments), initial=0))
            self._windows[window] = replace(self, segments=segments, key_starts=key_starts, window=window)
            for device, offsets in self._on_device.items():  # without another copy from the host: prefixes are shorter
                queries, keys = offsets.diff()
                seen = (queries + (keys - queries).clamp(max=window)).cumsum(0, dtype=offsets.dtype)
                self._windows[window].take(device, torch.stack([offsets[0], torch.nn.functional.pad(seen, (1, 0))]))
        return self._windows[window]

    @staticmethod
    def build(chunk: Chunk, padded_tokens: int) -> SegmentTable:
        padding = padded_tokens - chunk.num_tokens  # attends to itself only, so that nothing of it reaches the others
        segments = (*chunk.segments, *[Segment(-1, 0, padding)] * (padding > 0))
        query_starts = tuple(accumulate((segment.num_tokens for segment in segments), initial=0))
        key_starts = tuple(accumulate((segment.end for segment in segments), initial=0))
        return SegmentTable(segments, query_starts, key_starts)


def offsets_of(table: SegmentTable) -> Tensor:
    """Return the offsets of queries and of keys of a table, int32 ``[2, width]`` on the CPU.

    Offsets of empty segments follow, up to the class of the number of segments. Both rows begin at multiples of 16 bytes.
    """
    width = -(-(segment_class(len(table.segments)) + 1) // 4) * 4
    rows = [(*row, *repeat(row[-1], width - len(row))) for row in (table.query_starts, table.key_starts)]
    return torch.tensor(rows, dtype=torch.int32)
