"""Interfaces of a pipeline stage and of its offload, as the executor calls them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from megatron_epp.runtime.attention.kv_cache import KVRelay
from megatron_epp.runtime.autograd.saved import Owner
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.offload.activations import Timed


class Stage(Protocol):
    """A pipeline stage as the executor needs it."""

    relay: KVRelay

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        """Run a chunk. Returns the hidden states to hand on, or on the last stage the loss (a scalar)."""

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None, keep_weights: bool) -> None:
        """Differentiate `output`; `grad` is None on the last stage. With `keep_weights`, weight gradients wait for `weight`."""

    def weight(self, chunk: int) -> None:
        """Compute the weight gradients that a chunk's backward has kept."""

    def before_last_gradient(self) -> None:
        """Called once per iteration, ahead of the last action that gives the stage's parameters a gradient."""

    def reduce_gradients(self) -> None:
        """Called once per iteration: every gradient of the stage is complete, and the last one's message is on its way."""

    def release_output(self, output: Tensor) -> None:
        """The output has been sent; its storage is no longer needed."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Return shape, dtype and device of the hidden states of a chunk with `num_tokens` (padded) tokens."""


class Mover(Protocol):
    """Offload as the executor needs it; see `runtime.offload.activations.Offload`. `owner` is a stage and a chunk."""

    def forward_of(self, owner: Owner) -> AbstractContextManager[None]: ...
    def out(self, owner: Owner, share: float, timed: Timed) -> None: ...
    def free(self, owner: Owner) -> None: ...
    def back(self, owner: Owner, timed: Timed) -> None: ...
    def before_backward(self, owner: Owner) -> None: ...
    def assert_empty(self) -> None: ...
