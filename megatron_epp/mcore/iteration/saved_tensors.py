"""Tensors that a rank's stages keep for backward in one iteration, counted where memory is measured or plans offload."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.memory_use import Usage, device_usage


class SavedTensorTracker:
    """Bytes that one iteration keeps for backward on one rank: what `saved` counts within `context`, if it is not None."""

    def __init__(self, saved: SavedTensors | None = None) -> None:
        self._saved = saved
        self.context: AbstractContextManager[object] = saved or nullcontext()

    def kept_bytes(self) -> int:
        """Return the bytes allocated on a GPU, else saved for backwards; 0 if these are not counted."""
        if torch.cuda.is_initialized():
            return torch.cuda.memory_allocated()
        return 0 if self._saved is None else self._saved.live_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes held so far; None if they are not counted."""
        return None if self._saved is None else self._saved.peak_bytes

    def usage(self, static_bytes: int) -> Usage | None:
        """Return the bytes currently in use on this rank; on a CPU they are known only if saved tensors are counted."""
        if self._saved is None or torch.cuda.is_initialized():
            return device_usage(static_bytes)
        return Usage(static_bytes + self._saved.held_bytes)
