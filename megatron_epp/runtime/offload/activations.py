"""Activation offload: a chunk's saved tensors are copied to the host after its forward, and back before its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.saved import Owner, SavedTensors, Storage, bytes_of
from megatron_epp.runtime.offload.copy_streams import Mark
from megatron_epp.runtime.offload.host import HostMemory, Region

CopyTimer = AbstractContextManager[None]
"""Context manager that times the copies of one action, entered on their stream."""


class SavedPart(NamedTuple):
    """Storage, and the number of its bytes that are offloaded, from the first."""

    storage: Storage
    num_bytes: int

    def memory(self) -> Tensor:
        assert self.storage.memory is not None  # it is on the device
        return bytes_of(self.storage.memory)[: self.num_bytes]


@dataclass(slots=True)
class _Moved:
    """Offloaded parts of one chunk, one after the other in a region. `mark` is behind their last copy on its stream."""

    parts: list[SavedPart]
    region: Region
    mark: Mark = None

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for part in self.parts:
            yield from self.region.pairs(start, part.memory())
            start += part.num_bytes


class ActivationOffload:
    """Activation offload of one rank in one iteration. `saved` tracks all saved tensors, and is active while the plan runs.

    `host_bytes` are in host memory now, `host_peak_bytes` the most so far.
    """

    def __init__(self, saved: SavedTensors, host: HostMemory) -> None:
        self.host_bytes = self.host_peak_bytes = 0
        self._saved, self._host = saved, host
        self._moved: dict[Owner, _Moved] = {}

    def forward_of(self, owner: Owner) -> AbstractContextManager[None]:
        return self._saved.of(owner)

    def offload(self, owner: Owner, share: float, num_bytes: int = 0, timed: CopyTimer = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Begin to copy a share of a chunk's saved bytes to the host, at least `num_bytes`; they stay on the device until
        `free`.

        Storages with other references are not copied, because that would free nothing: parameters, messages in flight, storages
        that several chunks share.
        """
        storages = self._saved.pop(owner)  # only now: what the forward saved and dropped again is no longer among them
        wanted_bytes = max(num_bytes, round(share * sum(storage.num_bytes for storage in storages)))
        parts = choose([storage for storage in storages if storage.owner and storage.is_ours], wanted_bytes)
        moved = _Moved(parts, Region(self._host))
        moved.region.reserve(_size(parts))
        self._copy(moved, timed, out=True)
        self._moved[owner] = moved
        self.host_bytes += _size(parts)
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def free(self, owner: Owner) -> None:
        """Free the device memory of the parts that `offload` copied: whole storages first, for room to split the last."""
        moved = self._moved[owner]
        # The allocator gives freed memory to the next compute at once, so compute must be behind the copy that reads it.
        self._host.streams.wait(moved.mark)
        for part in moved.parts:
            self._saved.take_away(*part)

    def load(self, owner: Owner, timed: CopyTimer = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Begin to copy all parts of a chunk back to the device. In `free`, compute has waited for their offload."""
        moved = self._moved[owner]
        for storage, _ in reversed(moved.parts):  # a split storage is the last: its rest goes before the others need memory
            memory = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._host.device)
            self._saved.bring_back(storage, memory.untyped_storage())
        self._copy(moved, timed, out=False)
        moved.region.give_back(moved.mark)  # free for the next offload now, which waits for this load on its stream
        self.host_bytes -= _size(moved.parts)

    def _copy(self, moved: _Moved, timed: CopyTimer, out: bool) -> None:
        streams = self._host.streams
        with streams.copying(out), timed:
            for device, host in moved.pairs():
                (host if out else device).copy_(device if out else host, non_blocking=True)
            moved.mark = streams.mark(out)

    def before_backward(self, owner: Owner) -> None:
        """Make the compute stream wait for the copy back. Called before the backward of every chunk."""
        self._saved.pop(owner)
        moved = self._moved.pop(owner, None)
        if moved is not None:
            self._host.streams.wait(moved.mark)

    def assert_empty(self) -> None:
        """Raise `EppError` if offloaded parts are left in host memory."""
        if self._moved:
            raise EppError(f"activations of (stage, chunk) {sorted(self._moved)} were offloaded and never loaded")


def choose(storages: Sequence[Storage], num_bytes: int) -> list[SavedPart]:
    """Choose storages to offload `num_bytes` bytes; fewer only if the storages hold fewer.

    The largest come first, because every copy has a fixed cost; of equal ones, the first that the forward saved, because it
    is needed last. The last may be offloaded in part: the rest needs memory of its own, for which the storages offloaded whole
    must have made room. If they have not, it is offloaded whole, and smaller ones stay where it is enough without them.
    """
    parts, others = [], []
    for storage in sorted(storages, key=lambda storage: -storage.num_bytes):
        fits = 0 < storage.num_bytes <= num_bytes
        if fits:
            parts.append(SavedPart(storage, storage.num_bytes))
            num_bytes -= storage.num_bytes
        elif storage.num_bytes:
            others.append(storage)
    if others and num_bytes:
        last = others[-1]
        if last.num_bytes - num_bytes <= _size(parts):
            return [*parts, SavedPart(last, num_bytes)]
        spare = last.num_bytes - num_bytes
        parts.append(SavedPart(last, last.num_bytes))
        for part in parts[-2::-1]:
            if part.num_bytes <= spare:
                parts.remove(part)
                spare -= part.num_bytes
    return parts


def _size(parts: Sequence[SavedPart]) -> int:
    return sum(part.num_bytes for part in parts)
