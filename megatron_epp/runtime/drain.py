"""Completion of a plan without computing, on a rank that ran out of memory: it receives its messages and sends zeros.

Its peers complete their plans as usual, with invalid values, and no communicator is left with an unmatched message. The caller
must discard the results of the plan on all ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.saved import Owner
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.stage import Mover, Stage


class DrainedStage:
    """Replaces a stage that no longer computes. Implements `runtime.stage.Stage` with zeros that share one element."""

    def __init__(self, stage: Stage) -> None:
        stage.abandon()
        self.relay = stage.relay  # empty now
        self._stage = stage

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        return blank(*self._stage.message(context.table.num_tokens))

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None, keep_weights: bool) -> None:
        """Do nothing: no gradient is computed."""

    def weight(self, chunk: int) -> None:
        """Do nothing: no weight gradient was kept."""

    def before_last_gradient(self) -> None:
        """Do nothing: the gradients are invalid and are not reduced."""

    def reduce_gradients(self) -> None:
        """Do nothing: replicas whose last gradients are invalid must not wait here."""

    def release_output(self, output: Tensor) -> None:
        """Do nothing: the output has no storage of its own."""

    def abandon(self) -> None:
        """Do nothing: the stage was abandoned at construction."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return self._stage.message(num_tokens)


class DrainedOffload:
    """Replaces offload when nothing is kept any more. Implements `runtime.stage.Mover`."""

    def __init__(self, offload: Mover) -> None:
        offload.abandon()

    def forward_of(self, owner: Owner) -> AbstractContextManager[None]:
        return nullcontext()

    def out(self, owner: Owner, share: float, timed: AbstractContextManager[None] | None = None) -> None:
        """Do nothing: there is nothing to copy to the host."""

    def free(self, owner: Owner) -> None:
        """Do nothing: no device memory is held."""

    def back(self, owner: Owner, timed: AbstractContextManager[None] | None = None) -> None:
        """Do nothing: there is nothing to copy back."""

    def before_backward(self, owner: Owner) -> None:
        """Do nothing: there is no copy to wait for."""

    def abandon(self) -> None:
        """Do nothing: offload was abandoned at construction."""

    def assert_empty(self) -> None:
        """Do nothing: offload holds no data after `abandon`."""


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of a shape, all views of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
