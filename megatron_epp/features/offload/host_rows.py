"""Rows of shared prefixes in host memory, for sequences that others read: KV offload where sequences share prefixes.

Copies and compute take turns: attention waits for all rows of a layer, which are loaded to where they are put together for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_epp.features.offload.host import HostMemory, Region
from megatron_epp.runtime.attention.kv_cache import KVStore
from megatron_epp.runtime.attention.segments import Tensors


@dataclass(slots=True)
class _Sequence:
    """Rows of a sequence on one stage: a region of host memory, and the offset of each tensor in it."""

    region: Region
    offsets: dict[Any, list[int]] = field(default_factory=dict)


class HostRows(KVStore):
    """Rows of the `sequences` of one stage in host memory, and the sums of their gradients where a backward follows."""

    def __init__(self, host: HostMemory, sequences: Collection[int], trains: bool) -> None:
        super().__init__()
        self.sequences = frozenset(sequences)
        self.trains = trains
        self._host = host
        self._held: dict[int, _Sequence] = {}

    def reserve(self, sequence: int, key: Any, sizes: Collection[int]) -> None:
        """Take room for the tensors of a key, of so many bytes. That of a sequence is given back with its last key."""
        held = self._held.setdefault(sequence, _Sequence(Region(self._host)))
        held.offsets[key] = [held.region.reserve(size) for size in sizes]

    def copy_rows(self, sequence: int, key: Any, tensors: Tensors, out: bool, start: int = 0, first: int = 0) -> None:
        """Copy dense rows from `start` on to the host (`out`), or back, and have compute wait for that.

        They are of the tensors for which `reserve` took room, from number `first` on.
        """
        held, streams = self._held[sequence], self._host.streams
        with streams.copying(out):
            for offset, x in zip(held.offsets[key][first:], tensors, strict=False):
                rows = x.reshape(-1).view(torch.uint8)
                for device, host in held.region.pairs(offset + start * x[:1].nbytes, rows):
                    (host if out else device).copy_(device if out else host, non_blocking=True)
            mark = streams.mark(out)
        streams.wait(mark)

    def discard(self, sequence: int, key: Any) -> None:
        held = self._held[sequence]
        del held.offsets[key]
        if not held.offsets:
            held.region.give_back(self._host.streams.mark(False))  # behind all loads so far, which may still read it
            del self._held[sequence]
