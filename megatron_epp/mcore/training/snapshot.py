"""Snapshot of the state that an iteration changes before its optimizer step, so that the iteration can be undone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_epp.mcore.features import logged_router_losses


class Snapshot:
    """Copy of the random states, the models' buffers and the sums that routers keep for the log.

    Gradients are not copied, since they are as large as the model. An iteration begins without any, so they are zeroed.

    Args:
        models: this rank's model chunks, as Megatron wrapped them.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        # Megatron's wrapper has its own `buffers`.
        self._buffers = [(buffer, buffer.clone()) for model in models for buffer in torch.nn.Module.buffers(model)]
        self._routers = {key: values.clone() for key, values in logged_router_losses().items()}
        self._cpu, self._tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Restore the copied state and zero gradients. Call it outside the models' `no_sync`, which zeroing ends."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for key, values in logged_router_losses().items():
            values.copy_(self._routers.get(key, torch.zeros_like(values)))
        for model in self._models:
            if hasattr(model, "zero_grad_buffer"):
                model.zero_grad_buffer()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        get_cuda_rng_tracker().set_states(self._tracked)
