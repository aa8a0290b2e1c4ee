"""KV cache of sliced sequences: what a slice caches is handed to the later slices, and its gradient back to the earlier ones.

The forward of a slice writes its cached tensors (keys and values, or latents) behind the earlier slices' and attends over all
of them. Backward runs the slices last to first; each adds the gradient of the whole prefix to accumulators and takes out its
own part, which is complete because every later slice has run. `SlicedKVCache` holds the order of these steps; a store has the
tensors, in device memory, or where the store of a feature has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan.sizing import size_class, sums_in_fp32
from megatron_epp.runtime.attention.segments import HeadGroup, KVCacheError, SliceView, Tensors


class KVStore:
    """KV caches in device memory, by groups of heads of a layer: here one group has all of them.

    Buffers, of `num_bytes` now, are allocated once per sequence at its full length. A subclass has other memory for the caches
    of its `sequences`.
    """

    sequences: Collection[int] = ()

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rows: dict[tuple[int, HeadGroup], Tensors] = {}  # ``[size class of the sequence's capacity, heads, width]`` each
        self._gradients: dict[tuple[int, HeadGroup], Tensors] = {}

    def running(self, view: SliceView, backward: bool, num_whole: int, wide: bool) -> AbstractContextManager[None]:
        """Return the context of a run of a slice, as in `SlicedKVCache.running`; gradients add up in fp32 if `wide`."""
        return nullcontext()

    def parts(self, heads: int) -> int:
        return 1

    def create(self, view: SliceView, group: HeadGroup, like: Tensors) -> None:
        """Make room for a group of a sequence, whose tensors are like `like` except for the number of tokens."""
        num_rows = size_class(view.capacity)
        rows = self._rows[view.sequence, group] = tuple(x.new_empty((num_rows, *x.shape[1:])) for x in like)
        self.num_bytes += sum(x.nbytes for x in rows)

    def rows(self, view: SliceView, group: HeadGroup, num_rows: int) -> Tensors:
        """Return buffers on the device that have room for a chunk and hold the first `num_rows` tokens of a group."""
        return self._rows[view.sequence, group]

    def keep(self, view: SliceView, group: HeadGroup, rows: Tensors) -> None:
        """Keep the rows ``[view.start, view.stop)`` that were written to the buffers: these are the cache."""

    def expect_gradient(self, view: SliceView, group: HeadGroup) -> None:
        """Start to fetch the accumulators of a group, whose backward begins: they are on the device."""

    def add_gradient(self, view: SliceView, group: HeadGroup, grads: Tensors, heads: slice | None, wide: bool) -> Tensors:
        """Add gradients to the accumulators, which are fp32 if `wide`; return the complete ones of the chunk's own tokens."""
        key = view.sequence, group
        if key not in self._gradients:
            pairs = zip(grads, self._rows[key], strict=True)
            self._gradients[key] = tuple(_accumulator(grad, rows, heads, wide) for grad, rows in pairs)
            self.num_bytes += sum(x.nbytes for x in self._gradients[key])
        own = []
        for total, grad in zip(self._gradients[key], grads, strict=True):
            of_heads = total if heads is None else total[:, heads]
            if not view.is_last_slice:
                of_heads[: view.stop] += grad[: view.stop]
            elif heads is not None:
                of_heads[:] = grad
            mine, uncached = of_heads[view.start : view.stop].to(grad.dtype), grad[view.stop :]
            own.append(torch.cat([mine, uncached]) if uncached.shape[0] else mine)
        return tuple(own)

    def keep_gradient(self, view: SliceView, group: HeadGroup) -> None:
        """Keep the accumulators, to which gradients of all heads were added, for the slices before this one: they stay."""

    def free(self, view: SliceView, group: HeadGroup) -> None:
        key = view.sequence, group
        self.num_bytes -= sum(x.nbytes for x in (*self._rows.pop(key), *self._gradients.pop(key, ())))


def _accumulator(grad: Tensor, rows: Tensor, heads: slice | None, wide: bool) -> Tensor:
    """Return the accumulator of gradients: the first gradient if it has all heads, else an empty tensor for all heads."""
    dtype = torch.promote_types(rows.dtype, torch.float32) if wide else rows.dtype
    if heads is None:
        return grad.to(dtype)
    return torch.empty((grad.shape[0], *rows.shape[1:]), dtype=dtype, device=grad.device)


@dataclass(slots=True)
class _Progress:
    """Progress of a sequence through its slices, for one group; gradients of tokens from `taken_from` on are handed out."""

    heads: int
    filled: int = 0
    taken_from: int | None = None


@dataclass(slots=True)
class SlicedKVCache:
    """KV caches of one stage for one iteration."""

    fp32_gradients: str = "auto"  # for which sequences gradients of cached tensors add up in fp32, one of `sizing.FP32_CHOICES`
    offloaded: KVStore | None = None  # of a plan's offloaded KV caches, set by the feature that has memory for them
    _carried: dict[type[Any], Any] = field(default_factory=dict)
    _device: KVStore = field(default_factory=KVStore)
    _groups: dict[tuple[int, HeadGroup], _Progress] = field(default_factory=dict)
    _appended: tuple[SliceView, set[HeadGroup]] | None = None  # the slice whose forward runs, and what it has appended

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches and accumulators on the device now, and of what is handed over."""
        return self.cache_bytes + sum(part.num_bytes for part in self._carried.values())

    def carried[T](self, kind: type[T]) -> T:
        """Return what layers hand on besides cached tensors, an object with `num_bytes` and `assert_empty`, made when asked."""
        if kind not in self._carried:
            self._carried[kind] = kind()
        part: T = self._carried[kind]
        return part

    def of_kind[Cache: SlicedKVCache](self, kind: type[Cache]) -> Cache:
        """Return the cache of chunks that need one of another kind, with the same settings, made when asked."""
        cache = self.carried(kind)
        cache.fp32_gradients, cache.offloaded = self.fp32_gradients, self.offloaded
        return cache

    @property
    def cache_bytes(self) -> int:
        return self._device.num_bytes + (0 if self.offloaded is None else self.offloaded.num_bytes)

    def running(self, view: SliceView | None, backward: bool, num_whole: int = 0) -> AbstractContextManager[None]:
        """Return the context of a run of a chunk; attention of the first `num_whole` layers is recomputed in it."""
        if view is None:
            return nullcontext()
        within = self._store(view).running(view, backward, num_whole, self._is_wide(view))
        return within if backward else self._forward_of(view, within)

    @contextmanager
    def _forward_of(self, view: SliceView, within: AbstractContextManager[None]) -> Iterator[None]:
        self._appended = view, set()
        try:
            with within:
                yield
        finally:  # a recomputed forward appends again
            self._appended = None

    def parts(self, view: SliceView, heads: int) -> int:
        return self._store(view).parts(heads)

    def append(self, layer: int, view: SliceView, cached: Sequence[Tensor], part: int = 0) -> Tensors:
        """Cache a chunk's tensors, ``[tokens, heads, width]`` each: the slice, then the other tokens of its chunk.

        Returns all that its queries may attend to, ``[keys, heads, width]`` each. A recomputed forward writes the same values
        to the same rows, so it may run any number of times. Groups of heads come first to last.

        Raises `KVCacheError` if an earlier slice has not run, or this one has appended the group already: two layers with one
        number, or one that runs twice, would attend to each other's keys.
        """
        store, group, cached = self._store(view), HeadGroup(layer, part), tuple(cached)
        if self._appended is not None and self._appended[0] == view:
            if group in self._appended[1]:
                raise KVCacheError(
                    f"{_where(layer, view)}: attention runs twice in the forward of the slice at token {view.start}"
                )
            self._appended[1].add(group)
        progress = self._groups.get((view.sequence, group))
        if progress is None and view.start == 0:
            store.create(view, group, cached)
            progress = self._groups[view.sequence, group] = _Progress(cached[0].shape[1])
        if progress is None or progress.filled < view.start:
            filled = 0 if progress is None else progress.filled
            raise KVCacheError(
                f"{_where(layer, view)}: forward of the slice at token {view.start} finds the keys of {filled} tokens before it"
            )
        rows = store.rows(view, group, view.start)
        seen = _written(rows, view.start, cached)
        if progress.filled < view.stop:
            store.keep(view, group, rows)
            progress.filled = view.stop
        return seen

    def fetch(self, layer: int, view: SliceView, uncached: Sequence[Tensor], part: int = 0) -> Tensors:
        """Return what `append` returned for a chunk, for its backward. Groups of heads come last to first.

        Rows after the slice may be overwritten: later slices run their forwards later, and have run their backwards before.
        `uncached` are tensors of the chunk's tokens that are not in the cache, often none. Raises `KVCacheError` if a later
        slice has not run backward, or this one has.
        """
        taken_from = self._progress(layer, view, part).taken_from
        if taken_from is None and not view.is_last_slice:
            raise KVCacheError(f"{_where(layer, view)}: backward at token {view.start} comes before that of the last slice")
        if taken_from is not None and taken_from != view.end:
            raise KVCacheError(
                f"{_where(layer, view)}: backward of tokens {view.start} to {view.end} is out of order; "
                f"slices have run backward down to token {taken_from}"
            )
        store, group, uncached = self._store(view), HeadGroup(layer, part), tuple(uncached)
        store.expect_gradient(view, group)
        return _written(store.rows(view, group, view.stop), view.stop, uncached)

    def take_gradient(
        self, layer: int, view: SliceView, grads: Sequence[Tensor], part: int = 0, heads: slice | None = None
    ) -> Tensors:
        """Accumulate the gradient of all that a chunk attended to; return its own tokens' gradient, ``[tokens, heads, width]``.

        Gradients are ``[keys, heads, width]`` each, of some heads, first to last, or of all; a last slice's may become the
        accumulator, so the caller must not keep a reference. After the backward of the sequence's first slice its cache is
        freed.
        """
        progress, store, group = self._progress(layer, view, part), self._store(view), HeadGroup(layer, part)
        own = store.add_gradient(view, group, tuple(grads), heads, self._is_wide(view))
        if heads is None or heads.stop == progress.heads:
            progress.taken_from = view.start
            if view.start == 0:
                self.release(layer, view, part)
            else:
                store.keep_gradient(view, group)
        return own

    def release(self, layer: int, view: SliceView, part: int = 0) -> None:
        """Free a group: after its first slice's backward, or after its last slice's forward if no backward follows."""
        del self._groups[view.sequence, HeadGroup(layer, part)]
        self._store(view).free(view, HeadGroup(layer, part))

    def assert_empty(self) -> None:
        """Raise `KVCacheError` if a cache, or what was handed over, outlived its iteration."""
        for part in self._carried.values():
            part.assert_empty()
        if self._groups:
            left = sorted({(group.layer, sequence) for sequence, group in self._groups})
            raise KVCacheError(f"caches of (layer, sequence) {left} were never freed")

    def _store(self, view: SliceView) -> KVStore:
        return self.offloaded if self.offloaded is not None and view.sequence in self.offloaded.sequences else self._device

    def _is_wide(self, view: SliceView) -> bool:
        return sums_in_fp32(self.fp32_gradients, view.num_slices)

    def _progress(self, layer: int, view: SliceView, part: int) -> _Progress:
        progress = self._groups.get((view.sequence, HeadGroup(layer, part)))
        if progress is None:
            raise KVCacheError(f"{_where(layer, view)}: backward of the slice at token {view.start} finds no cache")
        return progress


def _written(rows: Tensors, start: int, values: Tensors) -> Tensors:
    end = start + values[0].shape[0]
    for buffer, value in zip(rows, values, strict=True):
        if end > start:
            buffer[start:end] = value
    return tuple(buffer[:end] for buffer in rows)


def _where(layer: int, view: SliceView) -> str:
    return f"layer {layer}, sequence {view.sequence}"
