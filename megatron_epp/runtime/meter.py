"""Counts the bytes autograd keeps for backward, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Held:
    """One saved tensor. The meter learns of its release when autograd drops this object."""

    __slots__ = ("_meter", "_storage", "tensor")

    def __init__(self, tensor: Tensor, meter: SavedTensorMeter) -> None:
        self.tensor = tensor.detach()  # an output refers to its own node: holding that would keep a dropped graph for ever
        self._meter = meter
        self._storage = meter._acquire(tensor)

    def __del__(self) -> None:
        self._meter._release(self._storage)


class SavedTensorMeter:
    """Live and peak bytes of saved tensors: each storage once, parameters not at all.

    Use as a context manager around whatever builds and frees graphs.

    Args:
        parameters: tensors that are there anyway and do not count.
        others: bytes held beside the saved tensors (the KV caches). Asked whenever saved tensors come or go, which is often
            enough to see every peak: caches grow between the two.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), others: Callable[[], int] = lambda: 0) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._others = others
        # Storages go by weak references, which keep their identity (not their memory) from being taken by another storage.
        self._ignored = {StorageWeakRef(p.untyped_storage()) for p in parameters}
        self._counts: dict[StorageWeakRef, tuple[int, int]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: _Held(t, self), lambda held: held.tensor)

    def __enter__(self) -> SavedTensorMeter:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self.observe()

    @property
    def held_bytes(self) -> int:
        """Saved tensors and the others now."""
        return self.live_bytes + self._others()

    def observe(self) -> None:
        """Raise the peak to what is live now."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _acquire(self, tensor: Tensor) -> StorageWeakRef | None:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if key in self._ignored:
            return None
        count, num_bytes = self._counts.get(key, (0, storage.nbytes()))
        self._counts[key] = (count + 1, num_bytes)
        if count == 0:
            self.live_bytes += num_bytes
        self.observe()
        return key

    def _release(self, key: StorageWeakRef | None) -> None:
        if key is None:
            return
        self.observe()
        count, num_bytes = self._counts[key]
        if count > 1:
            self._counts[key] = (count - 1, num_bytes)
        else:
            del self._counts[key]
            self.live_bytes -= num_bytes
