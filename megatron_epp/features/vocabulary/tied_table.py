"""Input embedding of a model whose output layer is tied to it and divided over the pipeline ranks.

The shards are the parameters. Before an iteration's first forward they send their rows to the first stage, which after the last
backward sends each the gradient of its rows, in fp32, before data-parallel reductions. Megatron all-reduces gradients of two
whole copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.features.vocabulary.vocabulary_shard import VocabularyShard


class TiedTable:
    """Exchange of the embedding's rows and gradients between shards and the first stage, whose `table` has no weight."""

    def __init__(self, shard: VocabularyShard, table: Any, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self._shard, self._table, self._ranks, self._group = shard, table, tuple(ranks), group
        self._gradient: Tensor | None = None
        if table is None:
            return
        own = shard.weight
        shape = (shard.vocabulary.rows[-1].stop, own.shape[1])
        # A tensor, no parameter: data parallelism and the optimizer have the shards. So its gradient, the sum over chunks, is
        # kept here, in fp32.
        table.weight = torch.zeros(shape, dtype=own.dtype, device=own.device)
        self._gradient = torch.zeros(shape, dtype=torch.float32, device=own.device)
        table.weight.requires_grad_().register_post_accumulate_grad_hook(self._add)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The whole table, which is no parameter of the model; empty on other ranks."""
        return () if self._table is None else (self._table.weight,)

    def _add(self, weight: Tensor) -> None:
        assert self._gradient is not None
        assert weight.grad is not None
        self._gradient.add_(weight.grad)
        weight.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the shards' rows to the first stage's table. A collective call of the pipeline's ranks."""
        rows = self._shard().detach()
        if self._table is None:
            self._run([dist.P2POp(dist.isend, rows.contiguous(), self._ranks[0], self._group)])
            return
        others = self._rows_of_others(self._table.weight.detach())
        self._table.weight.detach()[self._rows(0)].copy_(rows)
        self._run([dist.P2POp(dist.irecv, part, rank, self._group) for rank, part in others])

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradient of the first stage's table to the shards' gradients. A collective call of the pipeline's ranks."""
        weight: Any = self._shard.weight
        if self._gradient is None:
            rows = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            self._run([dist.P2POp(dist.irecv, rows, self._ranks[0], self._group)])
            weight.main_grad.add_(rows)
            return
        weight.main_grad.add_(self._gradient[self._rows(0)])
        self._run([dist.P2POp(dist.isend, part, rank, self._group) for rank, part in self._rows_of_others(self._gradient)])
        self._gradient.zero_()

    def forget_gradient(self) -> None:
        """Set the gradient to zero after a measurement, which is no part of training."""
        if self._gradient is not None:
            self._gradient.zero_()

    def _rows(self, position: int) -> slice:
        rows = self._shard.vocabulary.rows[position]
        return slice(rows.start, rows.stop)

    def _rows_of_others(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        return [(rank, whole[self._rows(position)]) for position, rank in enumerate(self._ranks) if position > 0]

    @staticmethod
    def _run(messages: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
