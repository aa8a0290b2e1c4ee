"""Program of a rank: its lowered actions and chunk layouts; and the interface of a stage that runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_epp.features import batch_target
from megatron_epp.plan import NO_RECOMPUTE, Action, Plan, Recompute, Segment
from megatron_epp.runtime.attention.context_parallel import ContextParallel
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from megatron_epp.runtime.autograd.handles import CachedAttentionOutput
from megatron_epp.runtime.upload import Upload


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """One chunk on one stage while it runs."""

    chunk: int
    table: SegmentTable
    kv_cache: SlicedKVCache
    view: SliceView | None = None  # the chunk's slice of a long sequence, or None when all its sequences are whole
    recompute: Recompute = NO_RECOMPUTE
    forward_only: bool = False
    # Attention output of a layer that is recomputed without its attention; None otherwise
    attention_output: CachedAttentionOutput | None = None
    # Chunks whose loss is computed together, the chunk among them; empty if it has a loss of its own
    loss_group: tuple[int, ...] = ()
    # The beginning of another long sequence, the chunk's last tokens, behind the end of the first; or None
    begun: SliceView | None = None
    context_parallel: ContextParallel | None = None  # how ranks share its tokens; None if as they share those of all chunks

    @property
    def begun_rows(self) -> slice:
        assert self.begun is not None
        return slice(self.table.num_real - self.begun.end, self.table.num_real)


class ChunkLayout(NamedTuple):
    """Layout of a chunk, the same on every stage."""

    table: SegmentTable
    view: SliceView | None
    loss_group: tuple[int, ...] = ()
    begun: SliceView | None = None
    cache: type[SlicedKVCache] = SlicedKVCache
    context_parallel: ContextParallel | None = None  # as in `ChunkContext`
    share: int = 1  # tokens of a rank, as a multiple of those that it would have if all context-parallel ranks shared the chunk

    @property
    def message_tokens(self) -> int:
        return self.table.num_tokens * self.share


def chunk_layouts(plan: Plan) -> tuple[ChunkLayout, ...]:
    if (make := batch_target(plan, "layouts")) is not None:
        layouts: tuple[ChunkLayout, ...] = make(plan)
        return layouts
    slices, begun = ([getattr(chunk, name)(plan.lengths) for chunk in plan.chunks] for name in ("slice_of", "begun_of"))
    num_slices = Counter(part.sequence for part in (*slices, *begun) if part is not None)
    room = {part.sequence: part.end for part in begun if part is not None}  # of which no others are in the buffer
    for c, part in enumerate(slices):  # in the buffer of a sequence, so that every chunk fits after the start of its slice
        if part is not None:
            room[part.sequence] = max(part.start + plan.padded_tokens(c), room.get(part.sequence, 0))

    def view(c: int, part: Segment | None) -> SliceView | None:
        if part is None:
            return None
        length, tokens = plan.lengths[part.sequence], plan.padded_tokens(c)
        # A last slice's chunk is stored whole, so its room is exact; earlier chunks share the room of the widest.
        capacity = part.start + tokens if part.end == length else room[part.sequence]
        return SliceView(*part, length, capacity, num_slices[part.sequence])

    loss_group = {c: group for group in plan.loss_groups for c in group}
    return tuple(
        ChunkLayout(SegmentTable.build(chunk, plan.padded_tokens(c)), view(c, part), loss_group.get(c, ()), view(c, starts))
        for c, (chunk, part, starts) in enumerate(zip(plan.chunks, slices, begun, strict=True))
    )


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's actions, sends and receives included, and all chunks' layouts; compute first waits for an `upload`."""

    actions: tuple[Action, ...]
    layouts: tuple[ChunkLayout, ...]
    upload: Upload | None = None


class Stage(Protocol):
    """A pipeline stage as the executor needs it."""

    kv_cache: SlicedKVCache
    has_gradient: bool
    """False if no parameter of this stage or of one before it trains: its forwards are without gradients, and no backward runs.
    """

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        """Run a chunk. Returns the hidden states to hand on, or on the last stage the loss (a scalar)."""

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        """Differentiate `output`; `grad` is None on the last stage."""

    def before_last_gradient(self) -> None:
        """Called once per iteration, ahead of the last action that gives the stage's parameters a gradient."""

    def reduce_gradients(self) -> None:
        """Called once per iteration: every gradient of the stage is complete, and the last one's message is on its way."""

    def release_output(self, output: Tensor) -> None:
        """The output has been sent; its storage is no longer needed."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Return shape, dtype and device of the hidden states of a chunk with `num_tokens` (padded) tokens."""
