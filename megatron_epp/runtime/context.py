"""What a rank runs: its lowered actions and chunk layouts, and the context of a chunk, passed to the stage that runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron_epp.plan import NO_RECOMPUTE, Action, Plan, Recompute, Segment
from megatron_epp.plan.lowering import lower
from megatron_epp.runtime.attention.kv_cache import KVRelay
from megatron_epp.runtime.attention.layout import SegmentTable, SliceView
from megatron_epp.runtime.autograd.handles import CachedAttentionOutput


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """One chunk on one stage while it runs.

    Attributes:
        chunk: index of the chunk in its plan.
        table: layout of its segments.
        relay: the stage's KV caches.
        view: the chunk's slice of a long sequence, or None when all its sequences are whole.
        recompute: number of the stage's layers that recompute their forward in backward, by the part recomputed.
        forward_only: no backward follows.
        attention_output: attention output of a layer that is recomputed without its attention; None otherwise.
    """

    chunk: int
    table: SegmentTable
    relay: KVRelay
    view: SliceView | None = None
    recompute: Recompute = NO_RECOMPUTE
    forward_only: bool = False
    attention_output: CachedAttentionOutput | None = None


class ChunkLayout(NamedTuple):
    """Layout of a chunk, the same on every stage."""

    table: SegmentTable
    view: SliceView | None


def chunk_layouts(plan: Plan) -> tuple[ChunkLayout, ...]:
    """Return the layout of every chunk of a plan."""
    slices = [chunk.slice_of(plan.lengths) for chunk in plan.chunks]
    num_slices = Counter(part.sequence for part in slices if part is not None)
    room: dict[int, int] = {}  # in the buffer of a sequence, so that every chunk fits after the start of its slice
    for c, part in enumerate(slices):
        if part is not None:
            room[part.sequence] = max(part.start + plan.padded_tokens(c), room.get(part.sequence, 0))

    def view(c: int, part: Segment) -> SliceView:
        length, tokens = plan.lengths[part.sequence], plan.padded_tokens(c)
        capacity = part.start + tokens if part.end == length else room[part.sequence]
        return SliceView(*part, length, capacity, num_slices[part.sequence])

    return tuple(
        ChunkLayout(SegmentTable.build(chunk, plan.padded_tokens(c)), None if part is None else view(c, part))
        for c, (chunk, part) in enumerate(zip(plan.chunks, slices, strict=True))
    )


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a plan.

    Attributes:
        actions: its actions in order, sends and receives included.
        layouts: layouts of every chunk.
    """

    actions: tuple[Action, ...]
    layouts: tuple[ChunkLayout, ...]


@lru_cache(maxsize=16)
def prepare(plan: Plan, rank: int) -> Program:
    """Lower a plan and lay out its chunks.

    The last 16 results are cached. Planning ahead calls this too, overlapped with the running iteration: for large plans it
    takes tens of milliseconds, which the executor then saves.
    """
    return Program(lower(plan)[rank], chunk_layouts(plan))
