"""Chunks of the batches that a training consumed. Those of a batch ahead are read, too, before training ends."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from megatron_epp.data.batch import ChunkArrays, GlobalBatch
from megatron_epp.data.iterator import PlannedBatches


def record_consumed[T](note: Callable[[ChunkArrays], T]) -> Callable[[], list[T]]:
    """Note every chunk that is read from now on; return a function that lists the notes of consumed batches' chunks."""
    notes: dict[tuple[int, ...], list[T]] = defaultdict(list)
    consumed: list[tuple[int, ...]] = []
    chunk_of, following = GlobalBatch.chunk_of, PlannedBatches.__next__

    @functools.wraps(chunk_of)
    def recorded(self: GlobalBatch, *args: Any, **named: Any) -> ChunkArrays:
        arrays = chunk_of(self, *args, **named)
        notes[tuple(self.indices)].append(note(arrays))
        return arrays

    @functools.wraps(following)
    def consuming(self: PlannedBatches) -> GlobalBatch:
        batch = following(self)
        consumed.append(tuple(batch.indices))
        return batch

    GlobalBatch.chunk_of, PlannedBatches.__next__ = recorded, consuming  # type: ignore[method-assign]
    return lambda: [one for batch in consumed for one in notes[batch]]
