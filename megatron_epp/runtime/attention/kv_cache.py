"""The KV relay: keys and values of sliced sequences, handed from slice to slice.

Forward of a slice writes its keys and values after those of the earlier slices and attends over all of them. Backward runs the
slices last to first; each adds the gradient of the whole prefix to accumulators and takes out its own part, which is complete
because every later slice has run. Buffers are allocated once per sequence at its full length and never grow.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_epp.plan.kv_sums import in_fp32
from megatron_epp.plan.size_class import size_class
from megatron_epp.runtime.attention.kv_offload import HostedCaches
from megatron_epp.runtime.attention.slice_view import RelayError, SliceView, check_backward, check_forward, no_cache
from megatron_epp.runtime.offload.host import HostMemory


@dataclass(slots=True)
class _Entry:
    """KV cache of one sequence in one layer: tensors ``[size class of its capacity, kv_heads, channels]``."""

    k: Tensor
    v: Tensor
    filled: int = 0
    """Number of tokens, from the first, whose keys and values are stored."""
    dk: Tensor | None = None
    dv: Tensor | None = None
    taken_from: int | None = None
    """First token whose gradient has been handed out; None before the first."""

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.dk, self.dv) if t is not None)


@dataclass(slots=True)
class KVRelay:
    """All caches of one stage for one iteration, keyed by (layer, sequence).

    Attributes:
        fp32_gradients: of which sequences gradients of keys and values add up in fp32, one of `kv_sums.CHOICES`.
        hosted: the offloaded KV caches, which are in host memory between uses; None if there are none.
    """

    fp32_gradients: str = "auto"
    hosted: HostedCaches | None = None
    _entries: dict[tuple[int, int], _Entry] = field(default_factory=dict)
    _resident_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches and accumulators on the device now."""
        return self._resident_bytes + (0 if self.hosted is None else self.hosted.num_bytes)

    def begin(self, hosted: Collection[int] = (), host: HostMemory | None = None) -> None:
        """Start an iteration.

        Args:
            hosted: sequences whose KV caches are offloaded to host memory between uses.
            host: the host memory that holds them.
        """
        self.hosted = HostedCaches(host, hosted, self.fp32_gradients) if host is not None and hosted else None

    def caches_of(self, view: SliceView) -> KVRelay | HostedCaches:
        """Return the object that holds a slice's KV cache: offloaded, or this one. Attention accesses it by groups of heads."""
        return self.hosted if self.hosted is not None and view.sequence in self.hosted.sequences else self

    def running(
        self, view: SliceView | None, backward: bool, num_whole: int = 0, forward_only: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context manager in which an action runs.

        Args:
            view: the chunk's slice, if it has one.
            backward: the action is a backward.
            num_whole: number of layers, from the stage's first, whose attention is recomputed in it.
            forward_only: no backward follows.
        """
        if view is None or self.hosted is None or view.sequence not in self.hosted.sequences:
            return nullcontext()
        is_last = view.start == 0 if backward else forward_only and view.is_tail
        return self.hosted.running(view, backward, num_whole, is_last)

    def parts(self, kv_heads: int) -> int:
        """Return the number of groups of heads that attention processes one after the other: 1, all heads at once."""
        return 1

    def append(self, layer: int, view: SliceView, k: Tensor, v: Tensor, part: int = 0) -> tuple[Tensor, Tensor]:
        """Store a chunk's keys and values and return all keys and values that its queries may attend to.

        A recomputed forward writes the same values to the same place, so it may run any number of times.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            k: ``[tokens, kv_heads, channels]``: the slice, then the other tokens of its chunk.
            v: as `k`.
            part: number of the group of heads, from 0.

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
            self._resident_bytes += entry.num_bytes
        check_forward(layer, view, 0 if entry is None else entry.filled)
        assert entry is not None  # checked
        count = view.num_cached
        entry.k[view.start : view.stop] = k[:count]
        entry.v[view.start : view.stop] = v[:count]
        entry.filled = max(entry.filled, view.stop)
        return self.keys_and_values(layer, view, k[count:], v[count:])

    def keys_and_values(
        self, layer: int, view: SliceView, k_beside: Tensor, v_beside: Tensor, part: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `append` returned for a chunk, for its backward.

        Rows after the slice may be overwritten: later slices run their forwards later, and have run their backwards before.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            k_beside: keys of the chunk that are not in the cache; often none.
            v_beside: as `k_beside`.
            part: as for `append`.
        """
        entry = self._entry(layer, view)
        end = view.stop + k_beside.shape[0]
        if end > view.stop:
            entry.k[view.stop : end] = k_beside
            entry.v[view.stop : end] = v_beside
        return entry.k[:end], entry.v[:end]

    def take_gradient(
        self, layer: int, view: SliceView, dk: Tensor, dv: Tensor, part: int = 0, heads: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Accumulate the gradient of all keys and values a chunk attended to and return the part of the chunk's own tokens.

        After the backward of the sequence's first slice its cache is freed.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            dk: ``[keys, kv_heads, channels]``; a tail's may become the accumulator, so the caller must not keep a reference.
            dv: as `dk`.
            part: as for `append`.
            heads: the heads of these gradients, if passed in groups, first to last; None if all are passed at once.

        Returns:
            ``[tokens, kv_heads, channels]`` of keys and of values, complete.

        Raises:
            RelayError: a later slice has not run backward, or this one has.
        """
        entry = self._entry(layer, view)
        if heads is None or heads.start == 0:
            check_backward(layer, view, entry.taken_from)
        if entry.dk is None or entry.dv is None:
            wide = in_fp32(self.fp32_gradients, view.num_slices)
            entry.dk, entry.dv = (_accumulator(*pair, heads, wide) for pair in ((dk, entry.k), (dv, entry.v)))
            self._resident_bytes += entry.dk.nbytes + entry.dv.nbytes
        own = []
        for total, grad in ((entry.dk, dk), (entry.dv, dv)):
            of_heads = total if heads is None else total[:, heads]
            if not view.is_tail:
                of_heads[: view.stop] += grad[: view.stop]
            elif heads is not None:
                of_heads[:] = grad
            own.append(_own(of_heads, grad, view))
        if heads is None or heads.stop == entry.k.shape[1]:
            entry.taken_from = view.start
            if view.start == 0:
                self.release(layer, view)
        return own[0], own[1]

    def release(self, layer: int, view: SliceView) -> None:
        """Free a sequence's cache: after its first slice's backward, or after its last forward if no backward follows."""
        self._resident_bytes -= self._entries.pop((layer, view.sequence)).num_bytes

    def clear(self) -> None:
        """Free every cache."""
        self._entries.clear()
        self._resident_bytes = 0
        if self.hosted is not None:
            self.hosted.clear()

    def assert_empty(self) -> None:
        """Raise `RelayError` if a cache outlived its iteration."""
        if self._entries:
            raise RelayError(f"caches of (layer, sequence) {sorted(self._entries)} were never freed")
        if self.hosted is not None:
            self.hosted.assert_empty()

    def _entry(self, layer: int, view: SliceView) -> _Entry:
        entry = self._entries.get((layer, view.sequence))
        if entry is None:
            raise no_cache(layer, view)
        return entry


def _own(accumulated: Tensor, grad: Tensor, view: SliceView) -> Tensor:
    own, beside = accumulated[view.start : view.stop].to(grad.dtype), grad[view.stop :]
    return torch.cat([own, beside]) if beside.shape[0] else own


def _accumulator(grad: Tensor, cache: Tensor, heads: slice | None, wide: bool) -> Tensor:
    """Return the accumulator of gradients: the first gradient if it has all heads, else an empty tensor for all heads."""
    dtype = torch.promote_types(grad.dtype, torch.float32) if wide else grad.dtype
    if heads is None:
        return grad.to(dtype)
    return torch.empty((grad.shape[0], *cache.shape[1:]), dtype=dtype, device=grad.device)
