"""Tensors that a rank's stages keep for backward in one iteration: counted where memory is measured, offloaded by plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.saved import Owner, SavedTensors
from megatron_epp.runtime.offload.activations import ActivationOffload
from megatron_epp.runtime.offload.host import HostMemory
from megatron_epp.runtime.out_of_memory import Usage, device_usage


class SavedTensorTracker:
    """Counts and offloads what one iteration keeps for backward on one rank, within `context`.

    Args:
        parameters: tensors that are not counted.
        host: host memory that offloaded tensors are copied to; None without offload, which needs tensors to be counted.
        counts: count the tensors that autograd saves.
        other_bytes: bytes held besides, such as cached keys and values.
        measures_shares: measure the share of a chunk's bytes that can be offloaded.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] = (),
        host: HostMemory | None = None,
        *,
        counts: bool = False,
        other_bytes: Callable[[], int] = lambda: 0,
        measures_shares: bool = False,
    ) -> None:
        self._saved = SavedTensors(parameters, other_bytes) if counts else None
        self.context: AbstractContextManager[object] = self._saved or nullcontext()
        self.offload: ActivationOffload | None = None
        if host is not None and self._saved is not None:
            self.offload = (OffloadWithShares if measures_shares else ActivationOffload)(self._saved, host)

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

    @property
    def offloadable_share(self) -> float | None:
        """Smallest share of a chunk's kept bytes that can be offloaded, 0 to 1; None where it is not measured."""
        return min(self.offload.shares, default=0.0) if isinstance(self.offload, OffloadWithShares) else None


class OffloadWithShares(ActivationOffload):
    """Offload that measures, at each backward, the share of a chunk's kept bytes that only autograd holds: of the chunks that
    kept something and offloaded nothing.
    """

    def __init__(self, saved: SavedTensors, host: HostMemory) -> None:
        super().__init__(saved, host)
        self.shares: list[float] = []

    def before_backward(self, owner: Owner) -> None:
        storages = self._saved.pop(owner)
        whole_bytes = sum(storage.num_bytes for storage in storages)
        if whole_bytes:
            own_bytes = sum(storage.num_bytes for storage in storages if storage.owner and storage.is_ours)
            self.shares.append(own_bytes / whole_bytes)
        super().before_backward(owner)
