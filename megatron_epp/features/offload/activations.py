"""Activation offload: a chunk's saved tensors are copied to the host after its forward, and back before its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.features.offload.copy_streams import Mark
from megatron_epp.features.offload.host import HostMemory, Region
from megatron_epp.plan import EppError
from megatron_epp.plan.attributes import having
from megatron_epp.runtime.autograd.saved import SavedTensors, Storage, bytes_of

CopyTimer = AbstractContextManager[None]
"""Context manager that times the copies of one action, entered on their stream."""
Owner = tuple[int, int]
"""Stage and chunk that saved tensors belong to."""


class OwnedStorage(Storage):
    """Storage of saved tensors with the chunk that owns it."""

    __slots__ = ("owner", "rest")

    def __init__(self, memory: torch.UntypedStorage, owner: Owner | None) -> None:
        super().__init__(memory)
        self.owner = owner  # the stage and chunk whose forward saved tensors in it; None if there is not exactly one
        self.rest: Tensor | None = None  # while offloaded, the last bytes, which stay on the device; None if all are offloaded

    @property
    def is_ours(self) -> bool:
        """True if only autograd's saved tensors keep the memory alive."""
        return self.memory is not None and torch._C._storage_Use_Count(self.memory._cdata) == 1


class SavedPart(NamedTuple):
    """Storage, and the number of its bytes that are offloaded, from the first."""

    storage: OwnedStorage
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


class OwnedTensors(SavedTensors):
    """Saved tensors that are tracked by chunk, so that they can be moved."""

    def __init__(self, parameters: Iterable[Tensor] = (), others: Callable[[], int] = lambda: 0) -> None:
        super().__init__(parameters, others)
        self._by_owner: dict[Owner, list[OwnedStorage]] = {}
        self._owner: Owner | None = None

    @contextmanager
    def of(self, owner: Owner) -> Iterator[None]:
        """Assign the tensors saved in the body to a chunk."""
        self._by_owner[owner] = []
        with having(self, _owner=owner):
            yield

    def pop(self, owner: Owner) -> list[OwnedStorage]:
        """Return and forget the storages saved by a chunk's forward that are still held, in the order of the forward."""
        return [storage for storage in self._by_owner.pop(owner, []) if storage.num_held]

    def take_away(self, storage: OwnedStorage, num_bytes: int) -> None:
        """Release a storage's device memory after its first `num_bytes` bytes have been copied to the host.

        The bytes that stay move to memory of their own, and exist twice for a moment.
        """
        assert storage.memory is not None
        self.observe()
        if num_bytes < storage.num_bytes:
            storage.rest = bytes_of(storage.memory)[num_bytes:].clone()
            self.live_bytes += storage.rest.nbytes
            self.observe()
        del self._storages[storage.memory._cdata]
        storage.memory = None
        self.live_bytes -= storage.num_bytes

    def bring_back(self, storage: OwnedStorage, memory: torch.UntypedStorage) -> None:
        """Place an offloaded storage in device memory again, and restore the bytes that had stayed there."""
        storage.memory = memory
        self._count(storage, memory)
        self.observe()
        if storage.rest is not None:
            bytes_of(memory)[-storage.rest.numel() :] = storage.rest
            self.live_bytes -= storage.rest.nbytes
            storage.rest = None

    def _storage_of(self, memory: torch.UntypedStorage) -> Storage:
        storage: OwnedStorage | None = self._storages.get(memory._cdata)
        if storage is None:
            storage = self._count(OwnedStorage(memory, self._owner), memory)
            if self._owner is not None:
                self._by_owner[self._owner].append(storage)
        elif storage.owner != self._owner:
            storage.owner = None
        return storage

    def _release(self, storage: Storage) -> None:
        if storage.memory is not None:
            super()._release(storage)
        elif isinstance(storage, OwnedStorage) and storage.rest is not None:  # dropped while it was away
            self.live_bytes -= storage.rest.nbytes


class ActivationOffload(OwnedTensors):
    """Activation offload of one rank in one iteration. It is active, as a context manager, while the plan runs.

    `shares`, None if they are not measured, are those of bytes that only autograd holds, at the backward of every chunk that
    kept something and offloaded nothing.
    """

    def __init__(
        self,
        host: HostMemory,
        parameters: Iterable[Tensor] = (),
        others: Callable[[], int] = lambda: 0,
        *,
        measures_shares: bool = False,
    ) -> None:
        super().__init__(parameters, others)
        self.shares: list[float] | None = [] if measures_shares else None
        self._host = host
        self._moved: dict[Owner, _Moved] = {}

    def offload(self, owner: Owner, share: float, num_bytes: int = 0, timed: CopyTimer = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Begin to copy `num_bytes` of a chunk's saved bytes to the host, or a share of them if that is 0; they stay on the
        device until `free`.

        Storages with other references are not copied, because that would free nothing: parameters, messages in flight, storages
        that several chunks share.
        """
        storages = self.pop(owner)  # only now: what the forward saved and dropped again is no longer among them
        wanted_bytes = num_bytes or round(share * sum(storage.num_bytes for storage in storages))
        parts = choose([storage for storage in storages if storage.owner and storage.is_ours], wanted_bytes)
        moved = _Moved(parts, Region(self._host))
        moved.region.reserve(_size(parts))
        self._copy(moved, timed, out=True)
        self._moved[owner] = moved

    def free(self, owner: Owner) -> None:
        """Free the device memory of the parts that `offload` copied: whole storages first, for room to split the last."""
        moved = self._moved[owner]
        # The allocator gives freed memory to the next compute at once, so compute must be behind the copy that reads it.
        self._host.streams.wait(moved.mark)
        for part in moved.parts:
            self.take_away(*part)

    def load(self, owner: Owner, timed: CopyTimer = nullcontext()) -> None:  # noqa: B008 - holds nothing
        """Begin to copy all parts of a chunk back to the device. In `free`, compute has waited for their offload."""
        moved = self._moved[owner]
        for storage, _ in reversed(moved.parts):  # a split storage is the last: its rest goes before the others need memory
            memory = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._host.device)
            self.bring_back(storage, memory.untyped_storage())
        self._copy(moved, timed, out=False)
        moved.region.give_back(moved.mark)  # free for the next offload now, which waits for this load on its stream

    def _copy(self, moved: _Moved, timed: CopyTimer, out: bool) -> None:
        streams = self._host.streams
        with streams.copying(out), timed:
            for device, host in moved.pairs():
                (host if out else device).copy_(device if out else host, non_blocking=True)
            moved.mark = streams.mark(out)

    def before_backward(self, owner: Owner) -> None:
        """Make the compute stream wait for the copy back. Called before the backward of every chunk."""
        storages = self.pop(owner)
        if self.shares is not None and any(storage.num_bytes for storage in storages):
            self.shares.append(movable_share(storages))
        moved = self._moved.pop(owner, None)
        if moved is not None:
            self._host.streams.wait(moved.mark)

    def assert_empty(self) -> None:
        """Raise `EppError` if offloaded parts are left in host memory."""
        if self._moved:
            raise EppError(f"activations of (stage, chunk) {sorted(self._moved)} were offloaded and never loaded")


def movable_share(storages: Sequence[OwnedStorage]) -> float:
    """Return the share of the bytes of a chunk's storages, 0 to 1, that nothing but its saved tensors holds."""
    own_bytes = sum(storage.num_bytes for storage in storages if storage.owner and storage.is_ours)
    return own_bytes / max(1, sum(storage.num_bytes for storage in storages))


def choose(storages: Sequence[OwnedStorage], num_bytes: int) -> list[SavedPart]:
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
