"""One iteration's sequences and plan, and the arrays of each of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.plan import Plan

PADDING_TOKEN = 0


class SequenceDataset(Protocol):
    """Sequences whose lengths are known without reading them.

    Attributes:
        lengths: integer array, one entry per sequence: the positions it trains, one less than its tokens.
    """

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Tokens ``[start, end)`` of the ``lengths[index] + 1`` tokens of a sequence; any integer type."""
        ...

    def trained(self, index: int, start: int, end: int) -> np.ndarray | None:
        """Mask of these tokens: 1 for a token that is trained where it is a label, 0 for others; None if all are trained."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkArrays:
    """Inputs of the first and the last stage for a chunk: CPU tensors of shape [padded tokens], or of a part of them.

    Attributes:
        tokens: int64 inputs.
        labels: int64, the token that follows each input.
        loss_mask: float32, 1 where the position counts in the loss, 0 elsewhere and in padding. A position counts if its label
            is a trained token of the dataset, and its input is not the batch's `mask_loss_of`.
        position_ids: int64, position in its own sequence; 0, 1, 2, ... in padding.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor

    def part(self, shard: Sequence[slice]) -> ChunkArrays:
        """Return the part of the arrays of one of the ranks that share the chunk's tokens.

        Args:
            shard: the rank's (padded) tokens.
        """

        def own(x: torch.Tensor) -> torch.Tensor:
            return x[shard[0]] if len(shard) == 1 else torch.cat([x[tokens] for tokens in shard])

        return ChunkArrays(own(self.tokens), own(self.labels), own(self.loss_mask), own(self.position_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """This replica's part of one global batch. Tokens are read only when a chunk is requested.

    Attributes:
        indices: of the sequences in the dataset.
        lengths: the positions each sequence trains.
        plan: the plan that runs them; None if the batch is used without a plan.
        plan_digest: its digest.
        trains: some token of the whole batch, over all replicas, is trained.
        prepared: what the plan's source has made of the batch for this rank, ahead of the iteration.
        global_size: sequences of the whole batch, over all replicas.
        consumed_samples: sequences that batches have had over all replicas up to this one, its own included.
        planning_us: time of planning, on the planning rank.
        dataset: source of the tokens.
        mask_loss_of: positions whose input is this token do not count in the loss (``eod_mask_loss``).
    """

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    plan: Plan | None = None
    dataset: SequenceDataset = field(repr=False, compare=False)
    mask_loss_of: int | None = None
    global_size: int = 0
    consumed_samples: int = 0
    trains: bool = True
    planning_us: float = field(default=0.0, compare=False)
    plan_digest: str = field(default="", compare=False)
    prepared: Any = field(default=None, repr=False, compare=False)

    def part(self, share: Sequence[int]) -> GlobalBatch:
        """A replica's part of a whole batch: the sequences at these positions."""
        return replace(self, indices=tuple(self.indices[at] for at in share), lengths=tuple(self.lengths[at] for at in share))

    def chunk(self, chunk: int) -> ChunkArrays:
        """The arrays of one chunk of the plan, padded to ``plan.padded_tokens(chunk)``."""
        assert self.plan is not None, "this batch carries no plan; use chunk_of"
        return self.chunk_of(self.plan.chunks[chunk].segments, self.plan.token_multiple)

    def chunk_of(self, segments: Sequence[Segment], multiple: int = 1) -> ChunkArrays:
        """The arrays of any list of segments, laid one after the other and padded at the end.

        Args:
            segments: parts of this batch's sequences (`Segment.sequence` counts in the batch, not in the dataset).
            multiple: the padded token count is the next multiple of this.
        """
        chunk = Chunk(tuple(segments))
        num_padded = chunk.padded_tokens(multiple)
        tokens = np.full(num_padded, PADDING_TOKEN, dtype=np.int64)
        labels = np.full(num_padded, PADDING_TOKEN, dtype=np.int64)
        position_ids = np.empty(num_padded, dtype=np.int64)
        loss_mask = np.ones(num_padded, dtype=np.float32)
        at = 0
        for sequence, start, end in chunk.segments:
            # One token more than there are positions: the last position's label.
            text = self.dataset.tokens(self.indices[sequence], start, end + 1)
            after = at + end - start
            tokens[at:after] = text[:-1]
            labels[at:after] = text[1:]
            position_ids[at:after] = np.arange(start, end)
            trained = self.dataset.trained(self.indices[sequence], start + 1, end + 1)
            if trained is not None:
                loss_mask[at:after] = trained
            at = after
        position_ids[at:] = np.arange(num_padded - at)
        if self.mask_loss_of is not None:
            loss_mask[tokens == self.mask_loss_of] = 0.0
        loss_mask[at:] = 0.0
        return ChunkArrays(*map(torch.from_numpy, (tokens, labels, loss_mask, position_ids)))
