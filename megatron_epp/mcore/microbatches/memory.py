"""Tensors that a script's stages keep for backward in one iteration: counted while costs are learnt, offloaded by plans."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_epp.runtime.autograd.saved import Owner, SavedTensors
from megatron_epp.runtime.offload.activations import ActivationOffload
from megatron_epp.runtime.offload.host import HostMemory


class KeptTensors:
    """Tensors kept for backward in one iteration, on one rank.

    Args:
        parameters: tensors that are not counted.
        host: host memory that offloaded tensors are copied to; None without offload.
        on_gpu: a GPU's allocator counts bytes; otherwise the tensors that autograd saves are counted.

    Attributes:
        context: to enter around the iteration's actions.
        offload: offload of activations, for the executor; None without.
    """

    def __init__(self, parameters: Iterable[Tensor], host: HostMemory | None, counts: bool, on_gpu: bool) -> None:
        self._on_gpu, self._counts = on_gpu, counts
        self._saved = SavedTensors(parameters) if host is not None or (counts and not on_gpu) else None
        self.context: AbstractContextManager[object] = self._saved or nullcontext()
        self.offload: OffloadWithShares | None = None
        if host is not None and self._saved is not None:
            self.offload = OffloadWithShares(self._saved, host)

    def held_bytes(self) -> int:
        """Return the bytes allocated on a GPU, else saved for backwards; 0 if the iteration is not measured."""
        if not self._counts:
            return 0
        return torch.cuda.memory_allocated() if self._on_gpu or self._saved is None else self._saved.live_bytes

    @property
    def offloadable_share(self) -> float | None:
        """Smallest share of a chunk's kept bytes that can be offloaded, 0 to 1; None without offload, which is not measured."""
        return None if self.offload is None else min(self.offload.shares, default=0.0)


class OffloadWithShares(ActivationOffload):
    """Offload that measures, at each backward, the share of a chunk's kept bytes that only autograd holds.

    Attributes:
        shares: of the chunks that kept something and offloaded nothing.
    """

    def __init__(self, saved: SavedTensors, host: HostMemory) -> None:
        super().__init__(saved, host)
        self.shares: list[float] = []

    def before_backward(self, owner: Owner) -> None:
        kept = self._saved.pop(owner)
        whole_bytes = sum(storage.num_bytes for storage in kept)
        if whole_bytes:
            own_bytes = sum(storage.num_bytes for storage in kept if storage.owner and storage.is_ours)
            self.shares.append(own_bytes / whole_bytes)
        super().before_backward(owner)
