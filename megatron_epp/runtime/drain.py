"""A rank that ran out of memory ends its plan without computing: it takes what it is sent and hands on zeros.

Its peers end their plans as they always do, though with garbage, and no communicator is left with half a message. Whoever runs
the plan must throw away what came of it, on all ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.saved import Owner
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.stage import Mover, Stage


class DrainedStage:
    """Stands in for a stage that computes no more. Implements `runtime.stage.Stage`; makes tensors without storage only."""

    def __init__(self, stage: Stage) -> None:
        stage.abandon()
        self.relay = stage.relay  # empty now
        self._stage = stage

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        return blank(*self._stage.message(context.table.num_tokens))

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None, keep_weights: bool) -> None:
        """Computes none."""

    def weight(self, chunk: int) -> None:
        """None was kept."""

    def before_last_gradient(self) -> None:
        """Nothing is reduced: the gradients are void."""

    def reduce_gradients(self) -> None:
        """Do nothing: replicas whose last gradients are void must not wait here."""

    def release_output(self, output: Tensor) -> None:
        """It has no storage."""

    def abandon(self) -> None:
        """Done."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return self._stage.message(num_tokens)


class DrainedOffload:
    """Stands in for offload where nothing is kept any more."""

    def __init__(self, offload: Mover) -> None:
        offload.abandon()

    def forward_of(self, owner: Owner) -> AbstractContextManager[None]:
        return nullcontext()

    def out(self, owner: Owner, share: float, timed: AbstractContextManager[None] | None = None) -> None:
        """Nothing leaves."""

    def free(self, owner: Owner) -> None:
        """As above."""

    def back(self, owner: Owner, timed: AbstractContextManager[None] | None = None) -> None:
        """As above."""

    def before_backward(self, owner: Owner) -> None:
        """As above."""

    def abandon(self) -> None:
        """Done."""

    def assert_empty(self) -> None:
        """It is."""


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, with storage for one of them."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
