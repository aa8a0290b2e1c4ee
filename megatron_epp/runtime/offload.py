"""Moves what autograd keeps of a chunk to the host after its forward, and back before its backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.host import HostMemory, pair_up
from megatron_epp.runtime.saved import Owner, SavedTensors, Storage
from megatron_epp.schedule import EppError

Timed = AbstractContextManager[None]
"""Stands around the copies of one action, on their stream."""


@dataclass(slots=True)
class _Moved:
    """What has left of one chunk. `mark` is the last copy's place on the copy stream."""

    storages: list[Storage]
    pages: list[Tensor]
    mark: Any


class Offload:
    """Offloads of one rank in one iteration.

    Args:
        saved: sees all that autograd keeps; active while the plan runs.
        host: where to.

    Attributes:
        host_bytes: at the host now.
        host_peak_bytes: most of it at one time.
    """

    def __init__(self, saved: SavedTensors, host: HostMemory) -> None:
        self.host_bytes = self.host_peak_bytes = 0
        self._saved, self._host = saved, host
        self._moved: dict[Owner, _Moved] = {}

    def forward_of(self, owner: Owner) -> AbstractContextManager[None]:
        """Around the forward of a chunk."""
        return self._saved.of(owner)

    def out(self, owner: Owner, share: float, timed: Timed = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Copy a share of the bytes kept of a chunk. They stay on the device until `free`.

        What others hold too stays out of it, for that would free nothing: parameters, messages on their way, what several
        chunks share.
        """
        kept = self._saved.pop(owner)
        chosen = choose([storage for storage in kept if storage.owner and storage.is_ours], share * _size(kept))
        pages = self._host.take([storage.num_bytes for storage in chosen])
        with self._host.copying(), timed:
            for device, host in pair_up([_place(storage) for storage in chosen], pages):
                host.copy_(device, non_blocking=True)
            self._moved[owner] = _Moved(chosen, pages, self._host.mark())
        self.host_bytes += _size(chosen)
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def free(self, owner: Owner) -> None:
        """Give back the device's memory of what `out` has copied."""
        moved = self._moved[owner]
        self._host.wait(moved.mark)
        for storage in moved.storages:
            self._saved.take_away(storage)

    def back(self, owner: Owner, timed: Timed = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Begin to copy all of it back."""
        moved = self._moved[owner]
        for storage in moved.storages:
            place = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._host.device)
            self._saved.bring_back(storage, place.untyped_storage())
        with self._host.copying(), timed:
            for on_device, at_host in pair_up([_place(storage) for storage in moved.storages], moved.pages):
                on_device.copy_(at_host, non_blocking=True)
            moved.mark = self._host.mark()
        self._host.give_back(moved.pages)
        moved.pages = []
        self.host_bytes -= _size(moved.storages)

    def before_backward(self, owner: Owner) -> None:
        """Ahead of the backward of any chunk: what was copied back is there."""
        self._saved.pop(owner)
        moved = self._moved.pop(owner, None)
        if moved is not None:
            self._host.wait(moved.mark)

    def abandon(self) -> None:
        """Give everything up: no backward follows in this iteration."""
        for moved in self._moved.values():
            self._host.wait(moved.mark)
            self._host.give_back(moved.pages)
        self._moved.clear()
        self._saved.disown()
        self.host_bytes = 0

    def assert_empty(self) -> None:
        """Raise `EppError` if anything is left at the host."""
        if self._moved:
            raise EppError(f"what was offloaded of (stage, chunk) {sorted(self._moved)} never came back")


def choose(storages: Sequence[Storage], num_bytes: float) -> list[Storage]:
    """Storages of so many bytes together, or more by less than the smallest one left out; fewer only if there are no others.

    The largest first, for every copy has a fixed cost; of equal ones those that the forward made first, for they are needed
    last.
    """
    chosen, others = [], []
    for storage in sorted(storages, key=lambda storage: -storage.num_bytes):
        fits = 0 < storage.num_bytes <= num_bytes
        (chosen if fits else others).append(storage)
        num_bytes -= fits * storage.num_bytes
    rest = [storage for storage in others if storage.num_bytes]
    return chosen + rest[-1:] if num_bytes >= 1 else chosen


def _size(storages: Sequence[Storage]) -> int:
    return sum(storage.num_bytes for storage in storages)


def _place(storage: Storage) -> torch.UntypedStorage:
    assert storage.place is not None  # it is on the device
    return storage.place
