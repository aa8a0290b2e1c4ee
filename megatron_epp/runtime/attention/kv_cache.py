"""The KV relay: keys and values of sliced sequences, handed from slice to slice.

Forward of a slice writes its keys and values behind those of the earlier slices and attends over all of them. Backward runs the
slices last to first; each adds the gradient of the whole prefix to accumulators and takes out its own part, which is complete
because every later slice has run. Buffers are made once per sequence at its full length: nothing grows.
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
    """Cache of one sequence in one layer: ``[size class of its capacity, kv_heads, channels]`` each."""

    k: Tensor
    v: Tensor
    filled: int = 0
    """Keys and values are there up to here."""
    dk: Tensor | None = None
    dv: Tensor | None = None
    taken_from: int | None = None
    """Gradients have been handed out from here on."""

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.dk, self.dv) if t is not None)


@dataclass(slots=True)
class KVRelay:
    """All caches of one stage for one iteration, keyed by (layer, sequence).

    Attributes:
        fp32_gradients: of which sequences gradients of keys and values add up in fp32, one of `kv_sums.CHOICES`.
        hosted: the caches that are at the host between uses; None where there are none.
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
            hosted: sequences whose caches are at the host between uses.
            host: where.
        """
        self.hosted = HostedCaches(host, hosted, self.fp32_gradients) if host is not None and hosted else None

    def caches_of(self, view: SliceView) -> KVRelay | HostedCaches:
        """Where a slice's cache is. Attention goes to it group of heads by group of heads."""
        return self.hosted if self.hosted is not None and view.sequence in self.hosted.sequences else self

    def running(
        self, view: SliceView | None, backward: bool, num_whole: int = 0, forward_only: bool = False
    ) -> AbstractContextManager[None]:
        """Around an action.

        Args:
            view: the chunk's slice, if it has one.
            backward: whether it is a backward.
            num_whole: layers, from the stage's first on, that run attention again in it.
            forward_only: no backward follows.
        """
        if view is None or self.hosted is None or view.sequence not in self.hosted.sequences:
            return nullcontext()
        is_last = view.start == 0 if backward else forward_only and view.is_tail
        return self.hosted.running(view, backward, num_whole, is_last)

    def parts(self, kv_heads: int) -> int:
        """Groups of heads that attention is to run by, one after the other: all at once."""
        return 1

    def append(self, layer: int, view: SliceView, k: Tensor, v: Tensor, part: int = 0) -> tuple[Tensor, Tensor]:
        """Store a chunk's keys and values and return all that its queries may see.

        A recomputed forward writes the same values to the same place, so it may run any number of times.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            k: ``[tokens, kv_heads, channels]``: the slice, then whatever shares its chunk.
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
        """What `append` returned for a chunk.

        Later slices' forwards come later and their backwards came before, so nobody needs what lies behind the slice.

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
        """Add the gradient of everything a chunk's queries saw and return the part of the chunk's own tokens.

        After the sequence's first slice its cache is freed.

        Args:
            layer: number of the layer.
            view: the chunk's slice.
            dk: ``[keys, kv_heads, channels]``; of a tail it may become the accumulator, so nobody else may hold it.
            dv: as `dk`.
            part: as for `append`.
            heads: which these are, where they come some at a time, first to last; None where all do.

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
        """Drop a sequence's cache: after its first slice's backward, or after its last forward where no backward follows."""
        self._resident_bytes -= self._entries.pop((layer, view.sequence)).num_bytes

    def clear(self) -> None:
        """Drop every cache."""
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
    """What gradients are added up in: the first of them where all heads are there, else room for all."""
    dtype = torch.promote_types(grad.dtype, torch.float32) if wide else grad.dtype
    if heads is None:
        return grad.to(dtype)
    return torch.empty((grad.shape[0], *cache.shape[1:]), dtype=dtype, device=grad.device)
