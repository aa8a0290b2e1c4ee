"""The KV relay: keys and values of sliced sequences, handed from slice to slice.

Forward of a slice writes its keys and values behind those of the earlier slices and attends over all of them. Backward runs the
slices last to first; each adds the gradient of the whole prefix to accumulators and takes out its own part, which is complete
because every later slice has run. Buffers are made once per sequence at its full length: nothing is ever concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_epp.schedule import EppError


class RelayError(EppError):
    """A slice met the cache in a state its plan rules out."""


@dataclass(slots=True)
class _Entry:
    """Cache of one sequence in one layer: ``[capacity, kv_heads, channels]`` each."""

    k: Tensor
    v: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SliceView:
    """One chunk's window on the cache of its sliced sequence.

    Attributes:
        sequence: index of the sequence.
        start: first token of the slice.
        end: one past its last token.
        length: tokens of the whole sequence.
        capacity: tokens the buffer holds: the sequence, and the short sequences that share the tail's chunk.
    """

    sequence: int
    start: int
    end: int
    length: int
    capacity: int

    @property
    def is_tail(self) -> bool:
        return self.end == self.length


@dataclass(slots=True)
class KVRelay:
    """All caches of one stage for one iteration, keyed by (layer, sequence)."""

    _entries: dict[tuple[int, int], _Entry] = field(default_factory=dict)
    num_bytes: int = 0
    """Bytes of all caches and accumulators now."""

    def append(self, layer: int, view: SliceView, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a chunk's keys and values and return all that its queries may see, as ``[keys, kv_heads, channels]``.

        The chunk's tokens are the slice, then whatever shares its chunk. A recomputed forward writes the same values to the
        same place, so it may run any number of times.
        """
        entry = self._entries.get((layer, view.sequence))
        if entry is None:
            if view.start > 0:
                raise RelayError(f"layer {layer}, sequence {view.sequence}: no slice before token {view.start} left its cache")
            entry = _Entry(k.new_empty((view.capacity, *k.shape[1:])), v.new_empty((view.capacity, *v.shape[1:])))
            self._entries[layer, view.sequence] = entry
            self.num_bytes += entry.k.nbytes + entry.v.nbytes
        num_slice = view.end - view.start
        if view.is_tail:  # the rest of the chunk fits behind the sequence's end
            stop = view.start + k.shape[0]
            entry.k[view.start : stop], entry.v[view.start : stop] = k, v
            return entry.k[:stop], entry.v[:stop]
        entry.k[view.start : view.end], entry.v[view.start : view.end] = k[:num_slice], v[:num_slice]
        if k.shape[0] == num_slice:
            return entry.k[: view.end], entry.v[: view.end]
        return torch.cat([entry.k[: view.end], k[num_slice:]]), torch.cat([entry.v[: view.end], v[num_slice:]])

    def take_gradient(self, layer: int, view: SliceView, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of everything a chunk's queries saw and return the part that belongs to the chunk's own tokens."""
        entry = self._entries.get((layer, view.sequence))
        if entry is None:
            raise RelayError(f"layer {layer}, sequence {view.sequence}: backward at token {view.start} finds no cache")
        if view.is_tail:
            entry.dk, entry.dv = dk, dv
            self.num_bytes += dk.nbytes + dv.nbytes
        elif entry.dk is None or entry.dv is None:
            raise RelayError(
                f"layer {layer}, sequence {view.sequence}: backward at token {view.start} precedes a later slice's"
            )
        else:
            entry.dk[: view.end] += dk[: view.end]
            entry.dv[: view.end] += dv[: view.end]
        own = [self._own(acc, grad, view) for acc, grad in ((entry.dk, dk), (entry.dv, dv))]
        if view.start == 0:
            self.release(layer, view)
        return own[0], own[1]

    @staticmethod
    def _own(accumulated: Tensor, grad: Tensor, view: SliceView) -> Tensor:
        if view.is_tail:
            return grad[view.start :]
        own = accumulated[view.start : view.end]
        return own if grad.shape[0] == view.end else torch.cat([own, grad[view.end :]])

    def release(self, layer: int, view: SliceView) -> None:
        """Drop a sequence's cache: after its first slice's backward, or after its last forward where no backward follows."""
        entry = self._entries.pop((layer, view.sequence))
        self.num_bytes -= sum(t.nbytes for t in (entry.k, entry.v, entry.dk, entry.dv) if t is not None)

    def keys_and_values(self, layer: int, view: SliceView, num_keys: int) -> tuple[Tensor, Tensor]:
        """What `append` returned for this chunk, without writing."""
        entry = self._entries[layer, view.sequence]
        return entry.k[:num_keys], entry.v[:num_keys]

    def assert_empty(self) -> None:
        """Raise `RelayError` if a cache outlived its iteration."""
        if self._entries:
            raise RelayError(f"caches of (layer, sequence) {sorted(self._entries)} were never freed")
