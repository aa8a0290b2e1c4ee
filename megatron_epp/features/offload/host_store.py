"""KV offload: KV caches kept in host memory between uses, for sequences whose caches exceed device memory.

Attention runs by groups of heads with a double buffer: while one group is computed, the cache of the next is copied
to the device. In backward, the gradient of a group's prefix is copied to the device overlapped with the group's kernel, added
to, and copied back overlapped with the next kernel. So the device holds three groups for any number of layers. Heads do not mix
inside attention: results are bitwise the same as with all heads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatron_epp.features.offload.copy_streams import Mark
from megatron_epp.features.offload.host import HostMemory, Region
from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.sizing import size_class
from megatron_epp.runtime.attention.kv_cache import KVStore
from megatron_epp.runtime.attention.segments import HeadGroup, SliceView, Tensors


class Use(NamedTuple):
    """Request for the first `num_rows` rows of a group."""

    group: HeadGroup
    num_rows: int


class PieceReader:
    """Reader of groups with two buffers: while one holds the requested group, the next is loaded into the other.

    Requests that differ from the `expected` ones, or from their order, are loaded when they are made. `load` begins to fill a
    buffer, 0 or 1, and returns a mark to wait for.
    """

    def __init__(self, expected: Iterable[Use], load: Callable[[Use, int], Mark]) -> None:
        self._expected = list(expected)[::-1]
        self._load = load
        self._current = 0
        self._held: HeadGroup | None = None
        self._coming: tuple[Use, Mark] | None = None

    def begin(self) -> None:
        if self._expected:
            self._current = 1  # `_fetch` fills the other one, and `take` then makes it the current one
            self._fetch(self._expected[-1])

    def take(self, use: Use) -> tuple[int, Mark]:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == use:
            self._current, mark = 1 - self._current, coming[1]
        elif self._held == use.group:
            mark = None  # it was just used
        else:
            mark = self._load(use, self._current)
        self._held = use.group
        if use in self._expected:
            while self._expected.pop() != use:  # skipped requests will not come
                pass
            if self._expected and self._expected[-1].group != use.group:  # the same group is in a buffer already
                self._fetch(self._expected[-1])
        return self._current, mark

    def _fetch(self, use: Use) -> None:
        self._coming = (use, self._load(use, 1 - self._current))


@dataclass(slots=True)
class _Sequence:
    """KV cache of a sequence in host memory."""

    region: Region
    num_rows: int  # tokens that a buffer on the device holds
    like: Tensors  # cached tensors of no token of a group
    # Offset in the region of the cache of every group, tensor after tensor
    rows: dict[HeadGroup, int] = field(default_factory=dict)
    # Offset of its gradient, laid out likewise, once that was copied to the host
    gradients: dict[HeadGroup, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """Running action and its device buffers: two for groups, and in backward one for the gradient of a group."""

    view: SliceView
    backward: bool
    wide: bool
    ahead: PieceReader
    buffers: list[Tensors] = field(default_factory=list)
    gradient: Tensors = ()
    current: int = 0  # number of the buffer that attention uses
    # Marks of the last offloads out of either buffer, which a load into it waits for. What was offloaded in earlier actions is
    # in host memory: compute has waited for it at their end, and loads wait for compute.
    left: list[Mark] = field(default_factory=lambda: [None, None])
    arriving: Mark = None  # mark behind which the gradient's buffer can be used


class HostStore(KVStore):
    """KV caches of the `sequences` of one stage that are offloaded in an iteration; `num_bytes` are on the device now."""

    def __init__(self, host: HostMemory, sequences: Collection[int]) -> None:
        super().__init__()
        self.sequences = frozenset(sequences)
        self._host = host
        self._held: dict[int, _Sequence] = {}
        self._layers: list[int] = []  # in the order of the forward
        self._num_parts = 1
        self._now: _Running | None = None

    @contextmanager
    def running(self, view: SliceView, backward: bool, num_whole: int, wide: bool) -> Iterator[None]:
        """Run a forward or backward of a slice in the body, with buffers allocated and prefetching started on entry."""
        now = self._now = _Running(view, backward, wide, PieceReader(self._uses(view, backward, num_whole), self._load))
        try:
            if view.sequence in self._held:
                self._open(now)
                now.ahead.begin()
            yield
        finally:
            self._wait(*map(self._host.streams.mark, (True, False)))  # buffers go, and copies are under way in them
            self._now, self.num_bytes = None, 0

    def parts(self, heads: int) -> int:
        self._num_parts = head_parts(heads)
        return self._num_parts

    def create(self, view: SliceView, group: HeadGroup, like: Tensors) -> None:
        if view.sequence not in self._held:
            empty = tuple(x.new_empty((0, *x.shape[1:])) for x in like)
            self._held[view.sequence] = _Sequence(Region(self._host), size_class(view.capacity), empty)
        if group.layer not in self._layers:
            self._layers.append(group.layer)
        self._open(self._running)
        self._held[view.sequence].rows[group] = self._reserve(view, self._running.buffers[0])

    def rows(self, view: SliceView, group: HeadGroup, num_rows: int) -> Tensors:
        """Return the buffers that hold a group. The next group is being copied into the others."""
        now = self._running
        self._open(now)
        now.current, mark = now.ahead.take(Use(group, num_rows))
        self._wait(mark)
        return now.buffers[now.current]

    def keep(self, view: SliceView, group: HeadGroup, rows: Tensors) -> None:
        now, offset = self._running, self._held[view.sequence].rows[group]
        # Only the slice's own rows: earlier ones are in host memory. The mark keeps the next load out of the buffer until then.
        now.left[now.current] = self._copy(rows, offset, view.start, view.stop, True)

    def expect_gradient(self, view: SliceView, group: HeadGroup) -> None:
        now, held = self._running, self._held[view.sequence]
        if group in held.gradients:
            now.arriving = self._copy(now.gradient, held.gradients[group], 0, view.stop, False, now.arriving)

    def add_gradient(self, view: SliceView, group: HeadGroup, grads: Tensors, heads: slice | None, wide: bool) -> Tensors:
        now, is_first = self._running, group not in self._held[view.sequence].gradients
        self._wait(now.arriving)  # behind the load of the sum, or behind the offload of the last group's, in the one buffer
        own = []
        for buffer, grad in zip(now.gradient, grads, strict=True):
            total = buffer if heads is None else buffer[:, heads]
            if is_first:
                total[: view.stop] = grad[: view.stop]
            else:
                total[: view.stop] += grad[: view.stop]
            own.append(torch.cat([total[view.start : view.stop].to(grad.dtype), grad[view.stop :]]))
        return tuple(own)

    def keep_gradient(self, view: SliceView, group: HeadGroup) -> None:
        now, held = self._running, self._held[view.sequence]
        if group not in held.gradients:
            held.gradients[group] = self._reserve(view, now.gradient)
        now.arriving = self._copy(now.gradient, held.gradients[group], 0, view.start, True)  # then it may be overwritten

    def free(self, view: SliceView, group: HeadGroup) -> None:
        """Free a group; the host memory of a sequence is given back with its last group."""
        held = self._held[view.sequence]
        del held.rows[group]
        if not held.rows:
            held.region.give_back(self._host.streams.mark(False))  # behind all loads so far, which may still read it
            del self._held[view.sequence]

    def _uses(self, view: SliceView, backward: bool, num_whole: int) -> Iterator[Use]:
        """Yield the requests of attention in an action, in order, for the layers seen so far."""
        parts = range(self._num_parts)
        if not backward:
            yield from (Use(HeadGroup(layer, part), view.start) for layer in self._layers for part in parts)
            return
        for position, layer in reversed(list(enumerate(self._layers))):
            if position < num_whole:
                yield from (Use(HeadGroup(layer, part), view.start) for part in parts)
            yield from (Use(HeadGroup(layer, part), view.stop) for part in reversed(parts))

    @property
    def _running(self) -> _Running:
        assert self._now is not None  # attention runs inside of actions
        return self._now

    def _open(self, now: _Running) -> None:
        if now.buffers:
            return
        held = self._held[now.view.sequence]
        now.buffers = [self._empty(held, [x.dtype for x in held.like]) for _ in range(2)]
        if now.backward:
            sums = [torch.promote_types(x.dtype, torch.float32) if now.wide else x.dtype for x in held.like]
            now.gradient = self._empty(held, sums)

    def _load(self, use: Use, number: int) -> Mark:
        now = self._running
        held = self._held.get(now.view.sequence)
        if held is None or use.group not in held.rows:  # a first slice: nothing to load, but rows may still be leaving
            return now.left[number]
        return self._copy(now.buffers[number], held.rows[use.group], 0, use.num_rows, False, now.left[number])

    def _wait(self, *marks: Mark) -> None:
        self._host.streams.wait(*marks)

    def _copy(self, buffers: Tensors, host_offset: int, start: int, stop: int, out: bool, *after: Mark) -> Mark:
        """Begin to copy rows of buffers to (`out`) or from their offset in the region, after marks; return the mark behind."""
        region, streams = self._held[self._running.view.sequence].region, self._host.streams
        with streams.copying(out, *after):
            for buffer in buffers:
                first = host_offset + start * buffer[0].nbytes
                for device, host in region.pairs(first, buffer[start:stop].reshape(-1).view(torch.uint8)):
                    (host if out else device).copy_(device if out else host, non_blocking=True)
                host_offset += buffer.nbytes
            return streams.mark(out)

    def _reserve(self, view: SliceView, buffers: Tensors) -> int:
        return self._held[view.sequence].region.reserve(sum(x.nbytes for x in buffers))

    def _empty(self, held: _Sequence, dtypes: Iterable[torch.dtype]) -> Tensors:
        sizes = zip(held.like, dtypes, strict=True)
        tensors = tuple(torch.empty((held.num_rows, *x.shape[1:]), dtype=dtype, device=x.device) for x, dtype in sizes)
        self.num_bytes += sum(x.nbytes for x in tensors)
        return tensors
