"""The KV relay: keys and values of sliced sequences, handed from slice to slice.

Forward of a slice writes its keys and values behind those of the earlier slices and attends over all of them. Backward runs the
slices last to first; each adds the gradient of the whole prefix to accumulators and takes out its own part, which is complete
because every later slice has run. Buffers are made once per sequence at its full length: nothing grows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_epp.schedule import EppError
from megatron_epp.schedule.size_class import size_class


class RelayError(EppError):
    """A slice met the cache in a state its plan rules out."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """One chunk's window on the cache of its sliced sequence.

    The cache takes the slice, and of the sequence's last chunk everything: what shares that chunk lies behind the sequence's
    end. What shares the chunk of an earlier slice lies *beside* the cache: behind the slice, where later slices write over it.

    Attributes:
        sequence: index of the sequence.
        start: first token of the slice.
        end: one past its last token.
        length: tokens of the whole sequence.
        capacity: tokens the buffer holds: every chunk of the sequence fits behind the start of its slice. Of a tail, those that
            its chunk fills.
    """

    sequence: int
    start: int
    end: int
    length: int
    capacity: int

    @property
    def is_tail(self) -> bool:
        return self.end == self.length

    @property
    def stop(self) -> int:
        """One past the last place in the buffer that the chunk fills."""
        return self.capacity if self.is_tail else self.end

    @property
    def num_cached(self) -> int:
        """How many of the chunk's tokens, from its first, go to the buffer."""
        return self.stop - self.start


@dataclass(slots=True)
class _Entry:
    """Cache of one sequence in one layer: ``[size class of its capacity, kv_heads, channels]`` each."""

    k: Tensor
    v: Tensor
    filled: int = 0
    """Keys and values are there up to here."""
    dk: Tensor | None = None
    dv: Tensor | None = None
    taken_from: int = 0
    """Gradients have been handed out from here on."""

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.dk, self.dv) if t is not None)


@dataclass(slots=True)
class KVRelay:
    """All caches of one stage for one iteration, keyed by (layer, sequence).

    Attributes:
        fp32_gradients: add up gradients of keys and values in fp32, whatever dtype the slices give them in.
    """

    fp32_gradients: bool = False
    _entries: dict[tuple[int, int], _Entry] = field(default_factory=dict)
    num_bytes: int = 0
    """Bytes of all caches and accumulators now."""

    def append(self, layer: int, view: SliceView, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a chunk's keys and values and return all that its queries may see.

        A recomputed forward writes the same values to the same place, so it may run any number of times.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            k: ``[tokens, kv_heads, channels]``: the slice, then whatever shares its chunk.
            v: as `k`.

        Returns:
            keys and values ``[keys, kv_heads, channels]``.

        Raises:
            RelayError: an earlier slice has not run.
        """
        entry = self._entries.get((layer, view.sequence))
        if entry is None and view.start == 0:
            rows = size_class(view.capacity)
            entry = _Entry(k.new_empty((rows, *k.shape[1:])), v.new_empty((rows, *v.shape[1:])))
            self._entries[layer, view.sequence] = entry
            self.num_bytes += entry.num_bytes
        filled = 0 if entry is None else entry.filled
        if entry is None or filled < view.start:
            raise RelayError(
                f"{_where(layer, view)}: forward of the slice at token {view.start} finds the keys of {filled} tokens before it"
            )
        count = view.num_cached
        entry.k[view.start : view.stop] = k[:count]
        entry.v[view.start : view.stop] = v[:count]
        entry.filled = max(filled, view.stop)
        return self.keys_and_values(layer, view, k[count:], v[count:])

    def keys_and_values(self, layer: int, view: SliceView, k_beside: Tensor, v_beside: Tensor) -> tuple[Tensor, Tensor]:
        """What `append` returned for a chunk.

        Later slices' forwards come later and their backwards came before, so nobody needs what lies behind the slice.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            k_beside: keys of the chunk that are not in the cache; often none.
            v_beside: as `k_beside`.
        """
        entry = self._entry(layer, view)
        end = view.stop + k_beside.shape[0]
        if end > view.stop:
            entry.k[view.stop : end] = k_beside
            entry.v[view.stop : end] = v_beside
        return entry.k[:end], entry.v[:end]

    def take_gradient(self, layer: int, view: SliceView, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of everything a chunk's queries saw and return the part of the chunk's own tokens.

        After the sequence's first slice its cache is freed.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            dk: ``[keys, kv_heads, channels]``; of a tail it becomes the accumulator, so nobody else may hold it.
            dv: as `dk`.

        Returns:
            ``[tokens, kv_heads, channels]`` of keys and of values, complete.

        Raises:
            RelayError: a later slice has not run backward, or this one has.
        """
        entry = self._entry(layer, view)
        if entry.dk is None or entry.dv is None:
            if not view.is_tail:
                raise RelayError(f"{_where(layer, view)}: backward at token {view.start} precedes the last slice's")
            entry.dk, entry.dv = self._accumulator(dk), self._accumulator(dv)
            self.num_bytes += entry.dk.nbytes + entry.dv.nbytes
        elif entry.taken_from != view.end:
            raise RelayError(
                f"{_where(layer, view)}: backward of tokens {view.start} to {view.end} is not the next; "
                f"slices have run backward down to token {entry.taken_from}"
            )
        else:
            entry.dk[: view.stop] += dk[: view.stop]
            entry.dv[: view.stop] += dv[: view.stop]
        entry.taken_from = view.start
        own_dk, own_dv = _own(entry.dk, dk, view), _own(entry.dv, dv, view)
        if view.start == 0:
            self.release(layer, view)
        return own_dk, own_dv

    def release(self, layer: int, view: SliceView) -> None:
        """Drop a sequence's cache: after its first slice's backward, or after its last forward where no backward follows."""
        self.num_bytes -= self._entries.pop((layer, view.sequence)).num_bytes

    def clear(self) -> None:
        """Drop every cache."""
        self._entries.clear()
        self.num_bytes = 0

    def assert_empty(self) -> None:
        """Raise `RelayError` if a cache outlived its iteration."""
        if self._entries:
            raise RelayError(f"caches of (layer, sequence) {sorted(self._entries)} were never freed")

    def _accumulator(self, grad: Tensor) -> Tensor:
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) if self.fp32_gradients else grad

    def _entry(self, layer: int, view: SliceView) -> _Entry:
        entry = self._entries.get((layer, view.sequence))
        if entry is None:
            raise RelayError(f"{_where(layer, view)}: backward of the slice at token {view.start} finds no cache")
        return entry


def _own(accumulated: Tensor, grad: Tensor, view: SliceView) -> Tensor:
    own, beside = accumulated[view.start : view.stop].to(grad.dtype), grad[view.stop :]
    return torch.cat([own, beside]) if beside.shape[0] else own


def _where(layer: int, view: SliceView) -> str:
    return f"layer {layer}, sequence {view.sequence}"
