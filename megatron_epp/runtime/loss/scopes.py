"""A loss over tokens, sequences or groups of them, of the log-probabilities that chunks give, with its gradient for each chunk.

The forward of a chunk gives log-probabilities of its labels, which hold their graph but no logits (`runtime.loss.blocks`). A
loss over tokens is added to that graph. For other losses, log-probabilities are leaves: with the last forward of the chunks
whose loss is computed together (`Plan.loss_groups`), the loss is differentiated with respect to the values of all of them, and
each chunk's backward begins with its own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.data.batch import LossArrays
from megatron_epp.data.samples import columns_of
from megatron_epp.losses import Loss, Rows, Scope
from megatron_epp.runtime.context import ChunkContext


class _Part(NamedTuple):
    """Tokens of one chunk over all context-parallel ranks, as rows; `leaf` is this rank's part of `values`.

    `num_sequences` is above the positions of its sequences in the batch.
    """

    chunk: int
    leaf: Tensor
    values: Tensor
    inputs: LossArrays
    num_sequences: int


class ScopedLoss:
    """Loss of the chunks of an iteration.

    Args:
        loss: the loss.
        context_ranks: ranks that share the tokens of a chunk; None if this rank has all.

    Attributes:
        asks: what the loss asks of a batch.
        scale: factor of every output, for programs whose data parallelism does not divide by the batch's tokens.
        keeps: list of each chunk and its log-probabilities, 0 for tokens that are not trained, or values of the model; None if
            they are not wanted.
    """

    def __init__(self, loss: Loss, context_ranks: dist.ProcessGroup | None = None) -> None:
        self.loss, self.asks, self.scale = loss, columns_of(loss), 1.0
        self._group = context_ranks if context_ranks is not None and context_ranks.size() > 1 else None
        self.keeps: list[tuple[int, Tensor]] | None = None
        self._waiting: dict[int, _Part] = {}  # by chunk, while others of its group have not run
        self._gradients: dict[int, Tensor] = {}

    def candidates(self, inputs: LossArrays) -> Tensor | None:
        """Return the tokens next to labels, ``[tokens, k]``, whose log-probabilities the loss asks for; None for none."""
        if self.asks.candidates is None:
            return None
        return self._by_name(inputs.columns)[self.asks.candidates].long()

    def forward(self, context: ChunkContext, values: Tensor, inputs: LossArrays) -> tuple[Tensor, Tensor]:
        """Compute what a chunk's forward completes.

        Args:
            context: of the chunk.
            values: ``[rows, tokens]`` of this rank, in fp32: log-probabilities of labels, those of each candidate, and
                entropies, as the loss asks; or the model's values.
            inputs: of the chunk.

        Returns:
            the chunk's output, a loss or the values that `gradient` belongs to; and this rank's sums to report, without
            gradients: the loss, the number that divides it, and the sums to log.
        """
        own = _Part(context.chunk, values, values, inputs, 1 + max(segment.sequence for segment in context.table.segments))
        if self.keeps is not None:
            found = values[0].detach()
            self.keeps.append((context.chunk, found if self.asks.has_values else found * (inputs.weights != 0)))
        if self.loss.scope == Scope.TOKEN:
            loss, logged = self.loss(self._rows([own]))
            return loss * self.scale, self._report(loss, logged, inputs.counts)
        trains, group = values.requires_grad, context.loss_group or (context.chunk,)
        self._waiting[context.chunk] = self._of_all_ranks(own._replace(leaf=values.detach().requires_grad_(trains)))
        if not all(chunk in self._waiting for chunk in group):
            none = inputs.counts.new_zeros([])
            return values, self._report(none, dict.fromkeys(self.loss.logged, none), inputs.counts)
        parts = [self._waiting.pop(chunk) for chunk in group]
        loss, logged = self.loss(self._rows(parts))
        if trains:
            gradients = torch.autograd.grad(loss * self.scale, [part.leaf for part in parts])
            self._gradients |= {part.chunk: gradient for part, gradient in zip(parts, gradients, strict=True)}
        if self._group is not None and dist.get_rank(self._group):  # all ranks of the group have the same loss
            loss, logged = torch.zeros_like(loss), {name: torch.zeros_like(value) for name, value in logged.items()}
        return values, self._report(loss, logged, inputs.counts)

    def gradient(self, chunk: int) -> Tensor | None:
        """Return the gradient of a chunk's output, once; None if the output is the loss itself."""
        return self._gradients.pop(chunk, None)

    def end(self) -> None:
        """Check that every sequence and group has been completed, and every gradient has been taken."""
        assert not self._waiting
        assert not self._gradients

    def _report(self, loss: Tensor, logged: dict[str, Tensor], counts: Tensor) -> Tensor:
        sums = (loss, counts.sum(), *(logged[name] for name in self.loss.logged))
        return torch.stack([value.detach().float() for value in sums])

    def _rows(self, parts: Sequence[_Part]) -> Rows:
        """Join the tokens of chunks, with what the loss's scope tells of sequences and groups."""
        joined, scope = [part.inputs for part in parts], self.loss.scope
        columns = self._by_name(torch.cat([each.columns for each in joined], dim=-1))
        values, weights = torch.cat([part.values for part in parts], dim=-1), torch.cat([each.weights for each in joined])
        if self.asks.has_values:
            rows = Rows(weights.new_empty(0), weights, columns, values=values[0])
        else:
            num_candidates = 0 if self.asks.candidates is None else self.asks.widths[self.asks.candidates]
            logprobs, of_candidates, entropy = values.split([1, num_candidates, len(values) - 1 - num_candidates])
            rows = Rows(logprobs[0], weights, columns, entropy[0] if len(entropy) else None)
            rows = replace(rows, candidate_logprobs=of_candidates.t()) if num_candidates else rows
        if scope == Scope.TOKEN:
            return rows
        sequence, group = (torch.cat([getattr(each, name) for each in joined]) for name in ("sequence", "group"))
        most = max(part.num_sequences for part in parts)
        return replace(rows, sequence=sequence, num_sequences=most, group=group if scope == Scope.GROUP else None)

    def _by_name(self, columns: Tensor) -> dict[str, Tensor]:
        """Return columns ``[rows, tokens]`` by name, as `Rows` has them."""
        widths = self.asks.widths
        found = columns.split([widths.get(name, 1) for name in self.asks.names])
        return {name: x.t() if name in widths else x[0] for name, x in zip(self.asks.names, found, strict=True)}

    def _of_all_ranks(self, part: _Part) -> _Part:
        if self._group is None:
            return part._replace(values=part.leaf)
        rank, given = dist.get_rank(self._group), part.inputs
        of_ranks = _gathered(part.leaf.detach(), self._group)
        of_ranks[rank] = part.leaf
        weights = torch.cat(_gathered(given.weights, self._group))
        sequence, group = torch.cat(_gathered(torch.stack([given.sequence, given.group]), self._group), dim=1)
        columns = weights.new_empty(0, len(weights))
        if len(given.columns):
            columns = torch.cat(_gathered(given.columns, self._group), dim=-1)
        arrays = LossArrays(weights, given.counts, sequence, group, columns)
        return part._replace(values=torch.cat(of_ranks, dim=-1), inputs=arrays)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape."""
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own.contiguous(), group=group)
    return found
