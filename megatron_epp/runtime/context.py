"""What a stage is told about the chunk it is running."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_epp.runtime.relay import KVRelay, SliceView
from megatron_epp.runtime.segments import SegmentTable
from megatron_epp.schedule import Plan


@dataclass(frozen=True)
class ChunkContext:
    """One chunk on one stage while it runs.

    Attributes:
        chunk: index of the chunk in its plan.
        table: layout of its segments.
        relay: the stage's KV caches.
        view: the chunk's slice of a long sequence, or None when all its sequences are whole.
        recompute_layers: how many of the stage's layers run their forward again in backward.
        forward_only: no backward follows.
    """

    chunk: int
    table: SegmentTable
    relay: KVRelay
    view: SliceView | None = None
    recompute_layers: int = 0
    forward_only: bool = False

    @cached_property
    def cached(self) -> bool:
        """Whether the relay holds every key and value of the chunk (not so for short sequences beside a slice's middle)."""
        return self.view is not None and (self.view.is_tail or len(self.table.segments) == 1)


def slice_view(plan: Plan, chunk: int) -> SliceView | None:
    """The slice a chunk holds, with room in its cache for what shares the chunk of the sequence's tail."""
    part = plan.chunks[chunk].slice_of(plan.lengths)
    if part is None:
        return None
    length = plan.lengths[part.sequence]
    tail, start = next(
        (c, s.start)
        for c, other in enumerate(plan.chunks)
        for s in other.segments
        if s.sequence == part.sequence and s.end == length
    )
    capacity = start + plan.padded_tokens(tail)
    return SliceView(part.sequence, part.start, part.end, length, capacity)


def chunk_context(plan: Plan, stage: int, chunk: int, relay: KVRelay) -> ChunkContext:
    """Everything stage `stage` needs to run `chunk`."""
    table = SegmentTable.build(plan.chunks[chunk], plan.padded_tokens(chunk))
    view = slice_view(plan, chunk)
    return ChunkContext(chunk, table, relay, view, plan.recompute_layers[stage][chunk], plan.forward_only)
