"""Moves what autograd keeps of a chunk to the host after its forward, and back before its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.saved import Owner, SavedTensors, Storage, bytes_of
from megatron_epp.runtime.offload.host import HostMemory, Region

Timed = AbstractContextManager[None]
"""Stands around the copies of one action, on their stream."""


class Part(NamedTuple):
    """A storage, and how many of its bytes leave, from its first."""

    storage: Storage
    num_bytes: int

    def memory(self) -> Tensor:
        """These bytes on the device, ``[num_bytes]``."""
        assert self.storage.place is not None  # it is on the device
        return bytes_of(self.storage.place)[: self.num_bytes]


@dataclass(slots=True)
class _Moved:
    """What has left of one chunk, and where it is, part after part. `mark` is the last copy's place on the copy stream."""

    parts: list[Part]
    region: Region
    mark: Any = None

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts on the device and at the host, cut so that they belong together."""
        start = 0
        for part in self.parts:
            yield from self.region.pairs(start, part.memory())
            start += part.num_bytes


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
        whole_bytes = sum(storage.num_bytes for storage in kept)
        parts = choose([storage for storage in kept if storage.owner and storage.is_ours], round(share * whole_bytes))
        moved = _Moved(parts, Region(self._host))
        moved.region.reserve(_size(parts))
        with self._host.copying(), timed:
            for device, host in moved.pairs():
                host.copy_(device, non_blocking=True)
            moved.mark = self._host.mark()
        self._moved[owner] = moved
        self.host_bytes += _size(parts)
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def free(self, owner: Owner) -> None:
        """Give back the device's memory of what `out` has copied: whole storages first, to have room to split the last."""
        moved = self._moved[owner]
        self._host.wait(moved.mark)
        for part in moved.parts:
            self._saved.take_away(*part)

    def back(self, owner: Owner, timed: Timed = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Begin to copy all of it back."""
        moved = self._moved[owner]
        for storage, _ in reversed(moved.parts):
            place = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._host.device)
            self._saved.bring_back(storage, place.untyped_storage())
        with self._host.copying(), timed:
            for on_device, at_host in moved.pairs():
                on_device.copy_(at_host, non_blocking=True)
            moved.mark = self._host.mark()
        moved.region.give_back()
        self.host_bytes -= _size(moved.parts)

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
            moved.region.give_back()
        self._moved.clear()
        self._saved.disown()
        self.host_bytes = 0

    def assert_empty(self) -> None:
        """Raise `EppError` if anything is left at the host."""
        if self._moved:
            raise EppError(f"what was offloaded of (stage, chunk) {sorted(self._moved)} never came back")


def choose(storages: Sequence[Storage], num_bytes: int) -> list[Part]:
    """So many bytes of storages; fewer only if there are no others.

    The largest first, for every copy has a fixed cost; of equal ones those that the forward made first, for they are needed
    last. The last may leave in part: what stays of it takes memory of its own, which those that leave whole must have made room
    for. Where they have not, it leaves whole.
    """
    parts, others = [], []
    for storage in sorted(storages, key=lambda storage: -storage.num_bytes):
        fits = 0 < storage.num_bytes <= num_bytes
        if fits:
            parts.append(Part(storage, storage.num_bytes))
            num_bytes -= storage.num_bytes
        elif storage.num_bytes:
            others.append(storage)
    if others and num_bytes:
        last = others[-1]
        parts.append(Part(last, num_bytes if last.num_bytes - num_bytes <= _size(parts) else last.num_bytes))
    return parts


def _size(parts: Sequence[Part]) -> int:
    return sum(part.num_bytes for part in parts)
