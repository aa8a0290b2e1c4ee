"""A loss over tokens or over sequences, of the log-probabilities that chunks give, with its gradient for each chunk.

The forward of a chunk gives log-probabilities of its labels, which hold their graph but no logits (`runtime.loss.blocks`). A
loss over tokens is added to that graph. For a loss over sequences, log-probabilities are leaves: with the forward of a
sequence's last slice the loss is differentiated with respect to those of all its slices, and each chunk's backward begins with
its own. A slice's backward follows those of later slices, whose gradients of keys and values it needs, and so that forward.
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
    """Tokens of one chunk over all context-parallel ranks, as rows; `leaf` is this rank's part of `values`."""

    chunk: int
    leaf: Tensor
    values: Tensor
    inputs: LossArrays

    def counting(self, rows: Tensor) -> _Part:
        """Return this part with the weights of the other rows at 0; `rows` is ``[tokens]``, boolean."""
        given = self.inputs
        return self._replace(inputs=LossArrays(given.weights * rows, given.counts, given.sequence, given.columns))


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
        self._slices: dict[int, list[_Part]] = {}  # of a sequence whose last slice has not run
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
        own = _Part(context.chunk, values, values, inputs)
        if self.keeps is not None:
            found = values[0].detach()
            self.keeps.append((context.chunk, found if self.asks.has_values else found * (inputs.weights != 0)))
        if self.loss.scope == Scope.TOKEN:
            loss, logged = self.loss(self._rows([own], None))
            return loss * self.scale, self._report(loss, logged, inputs.counts)
        trains = values.requires_grad
        own = self._of_all_ranks(own._replace(leaf=values.detach().requires_grad_(trains)))
        parts, view = [own], context.view
        if view is not None and view.is_tail:
            parts += self._slices.pop(view.sequence, [])
        elif view is not None:  # a slice is the first segment of its chunk
            self._slices.setdefault(view.sequence, []).append(own.counting(own.inputs.sequence == 0))
            parts = [own.counting(own.inputs.sequence != 0)]
        num_real = sum(segment.sequence >= 0 for segment in context.table.segments)
        loss, logged = self.loss(self._rows(parts, num_real + 1))
        if trains:
            gradients = torch.autograd.grad(loss * self.scale, [part.leaf for part in parts])
            for part, gradient in zip(parts, gradients, strict=True):
                known = self._gradients.get(part.chunk)
                self._gradients[part.chunk] = gradient if known is None else known + gradient
        if self._group is not None and dist.get_rank(self._group):  # all ranks of the group have the same loss
            loss, logged = torch.zeros_like(loss), {name: torch.zeros_like(value) for name, value in logged.items()}
        return values, self._report(loss, logged, inputs.counts)

    def gradient(self, chunk: int) -> Tensor | None:
        """Return the gradient of a chunk's output, once; None if the output is the loss itself."""
        return self._gradients.pop(chunk, None)

    def end(self) -> None:
        """Check that every sequence has been completed, and every gradient has been taken."""
        assert not self._slices
        assert not self._gradients

    def _report(self, loss: Tensor, logged: dict[str, Tensor], counts: Tensor) -> Tensor:
        sums = (loss, counts.sum(), *(logged[name] for name in self.loss.logged))
        return torch.stack([value.detach().float() for value in sums])

    def _rows(self, parts: Sequence[_Part], num_sequences: int | None) -> Rows:
        """Join parts, of which the first has all segments of its chunk and the others the slice that is its first segment."""
        joined = [part.inputs for part in parts]
        columns = self._by_name(torch.cat([each.columns for each in joined], dim=-1))
        values, weights = torch.cat([part.values for part in parts], dim=-1), torch.cat([each.weights for each in joined])
        if self.asks.has_values:
            rows = Rows(weights.new_empty(0), weights, columns, values=values[0])
        else:
            num_candidates = 0 if self.asks.candidates is None else self.asks.widths[self.asks.candidates]
            logprobs, of_candidates, entropy = values.split([1, num_candidates, len(values) - 1 - num_candidates])
            rows = Rows(logprobs[0], weights, columns, entropy[0] if len(entropy) else None)
            rows = replace(rows, candidate_logprobs=of_candidates.t()) if num_candidates else rows
        if num_sequences is None:
            return rows
        others = [torch.where(each.sequence == 0, 0, num_sequences - 1) for each in joined[1:]]
        return replace(rows, sequence=torch.cat([joined[0].sequence, *others]), num_sequences=num_sequences)

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
        weights, sequence = (torch.cat(_gathered(x, self._group)) for x in (given.weights, given.sequence))
        columns = weights.new_empty(0, len(weights))
        if len(given.columns):
            columns = torch.cat(_gathered(given.columns, self._group), dim=-1)
        arrays = LossArrays(weights, given.counts, sequence, columns)
        return part._replace(values=torch.cat(of_ranks, dim=-1), inputs=arrays)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape."""
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own.contiguous(), group=group)
    return found
