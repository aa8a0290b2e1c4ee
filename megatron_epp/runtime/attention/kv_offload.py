"""KV offload: KV caches kept in host memory between uses, for sequences whose caches exceed device memory.

Attention runs by groups of heads, *pieces*, with a double buffer: while one piece is computed, the keys and values of the next
are copied to the device. In backward, the gradient of a piece's prefix is copied to the device overlapped with the piece's
kernel, added to, and copied back overlapped with the next kernel. So the device holds three pieces for any number of layers.
Heads do not mix inside attention: results are bitwise those of all heads at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.kv_sums import in_fp32
from megatron_epp.plan.size_class import size_class
from megatron_epp.runtime.attention.double_buffer import LookAhead, Piece, Use
from megatron_epp.runtime.attention.slice_view import RelayError, SliceView, check_backward, check_forward, no_cache
from megatron_epp.runtime.offload.host import HostMemory, Region


@dataclass(slots=True)
class _AtHost:
    """A piece of a sequence's KV cache in host memory.

    Attributes:
        kv: offset of its keys, followed by its values, in the sequence's region.
        gradient: offset of their gradients, laid out likewise; None until they are first copied to the host.
    """

    kv: int
    gradient: int | None = None
    filled: int = 0
    """Number of tokens, from the first, whose keys and values are stored."""
    taken_from: int | None = None
    """First token whose gradient has been handed out; None before the first."""


@dataclass(slots=True)
class _Running:
    """The running action and its device buffers, ``[2, rows, heads, channels]`` each."""

    view: SliceView
    backward: bool
    ahead: LookAhead
    kv: list[Tensor]
    gradient: Tensor | None = None
    arriving: Any = None
    """Position on the copy stream after which the gradient's buffer can be used."""


class HostedCaches:
    """The offloaded KV caches of one stage in one iteration, with the interface that `KVRelay` has for attention.

    Args:
        host: the host memory that holds them.
        sequences: the sequences whose caches are offloaded.
        fp32_gradients: see `KVRelay`.

    Attributes:
        num_bytes: bytes on the device now.
        host_bytes: bytes in host memory now.
        host_peak_bytes: largest `host_bytes` so far.
    """

    def __init__(self, host: HostMemory, sequences: Collection[int], fp32_gradients: str = "auto") -> None:
        self.sequences = frozenset(sequences)
        self.num_bytes = self.host_bytes = self.host_peak_bytes = 0
        self._host, self._fp32_gradients = host, fp32_gradients
        self._regions: dict[int, Region] = {}
        self._num_rows: dict[int, int] = {}
        self._pieces: dict[tuple[int, Piece], _AtHost] = {}
        self._layers: list[int] = []  # in the order of the forward
        self._num_parts = 1
        self._like: Tensor | None = None  # one token's keys of a piece
        self._now: _Running | None = None

    @contextmanager
    def running(self, view: SliceView, backward: bool, num_whole: int, is_last: bool) -> Iterator[None]:
        """Run a forward or backward of a slice in the body: buffers are allocated and prefetching starts on entry.

        Args:
            view: the slice.
            backward: the action is a backward.
            num_whole: number of layers, from the stage's first, whose attention is recomputed in it.
            is_last: the caches of the sequence are not needed afterwards.
        """
        uses = self._uses(view, backward, num_whole)
        self._now = _Running(view, backward, LookAhead(uses, self._load), [])
        try:
            if self._like is not None and view.sequence in self._num_rows:
                self._open(self._now, self._like)
                self._now.ahead.begin()
            yield
            if is_last:
                self._drop(view.sequence)
        finally:
            self._host.wait(self._host.mark())  # buffers go, and copies are under way in them
            self._now, self.num_bytes = None, 0

    def parts(self, kv_heads: int) -> int:
        """Return the number of groups of heads that attention processes one after the other."""
        self._num_parts = head_parts(kv_heads)
        return self._num_parts

    def append(self, layer: int, view: SliceView, k: Tensor, v: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """Store and return keys and values as `KVRelay.append` does, for a group of heads. Groups come first to last."""
        use = Use(Piece(layer, part), view.start)
        piece = self._pieces.get((view.sequence, use.piece))
        if piece is None and view.start == 0:
            piece = self._new(view, use.piece, k)
        check_forward(layer, view, 0 if piece is None else piece.filled)
        assert piece is not None  # checked
        buffer, end = self._buffer(use, k), view.start + k.shape[0]
        buffer[0, view.start : end], buffer[1, view.start : end] = k, v  # including the chunk's tokens beside the slice
        if piece.filled < view.stop:
            self._copy(buffer, piece.kv, view.start, view.stop, out=True)
            piece.filled = view.stop
        return buffer[0, :end], buffer[1, :end]

    def keys_and_values(
        self, layer: int, view: SliceView, k_beside: Tensor, v_beside: Tensor, part: int
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values as `KVRelay.keys_and_values` does, for the backward of a group of heads.

        Groups come last to first.
        """
        piece, now = self._piece(layer, view, part), self._running
        check_backward(layer, view, piece.taken_from)
        assert now.gradient is not None  # a backward runs
        if piece.gradient is not None:
            now.arriving = self._copy(now.gradient, piece.gradient, 0, view.stop, out=False)
        buffer = self._buffer(Use(Piece(layer, part), view.stop), k_beside)
        end = view.stop + k_beside.shape[0]
        buffer[0, view.stop : end], buffer[1, view.stop : end] = k_beside, v_beside
        return buffer[0, :end], buffer[1, :end]

    def take_gradient(
        self, layer: int, view: SliceView, dk: Tensor, dv: Tensor, part: int, heads: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Accumulate gradients as `KVRelay.take_gradient` does, for a group of heads or some heads of it."""
        piece, now = self._piece(layer, view, part), self._running
        assert now.gradient is not None  # `keys_and_values` came before
        self._host.wait(now.arriving)
        own = []
        for buffer, grad in zip(now.gradient, (dk, dv), strict=True):
            total = buffer if heads is None else buffer[:, heads]
            if piece.gradient is None:
                total[: view.stop] = grad[: view.stop]
            else:
                total[: view.stop] += grad[: view.stop]
            own.append(torch.cat([total[view.start : view.stop].to(grad.dtype), grad[view.stop :]]))
        if heads is not None and heads.stop < now.gradient.shape[2]:
            return own[0], own[1]
        if view.start > 0:
            if piece.gradient is None:
                piece.gradient = self._reserve(view, now.gradient)
            now.arriving = self._copy(now.gradient, piece.gradient, 0, view.start, out=True)  # then it may be written again
        piece.taken_from = view.start
        return own[0], own[1]

    def release(self, layer: int, view: SliceView) -> None:
        """Do nothing: all caches of a sequence are freed together, at the end of the last action that needs them."""

    def clear(self) -> None:
        """Free every cache."""
        for sequence in list(self._regions):
            self._drop(sequence)

    def assert_empty(self) -> None:
        """Raise `RelayError` if a cache outlived its iteration."""
        if self._regions:
            raise RelayError(f"hosted caches of sequences {sorted(self._regions)} were never freed")

    def _uses(self, view: SliceView, backward: bool, num_whole: int) -> Iterator[Use]:
        """Yield the requests of attention in an action, in order, for the layers seen so far."""
        parts = range(self._num_parts)
        if not backward:
            yield from (Use(Piece(layer, part), view.start) for layer in self._layers for part in parts)
            return
        for place, layer in reversed(list(enumerate(self._layers))):
            if place < num_whole:
                yield from (Use(Piece(layer, part), view.start) for part in parts)
            yield from (Use(Piece(layer, part), view.stop) for part in reversed(parts))

    @property
    def _running(self) -> _Running:
        assert self._now is not None  # attention runs inside of actions
        return self._now

    def _buffer(self, use: Use, like: Tensor) -> Tensor:
        """Return the buffer that holds a request. The next request is being copied into the other."""
        now = self._running
        self._open(now, like)
        number, mark = now.ahead.take(use)
        self._host.wait(mark)
        return now.kv[number]

    def _open(self, now: _Running, like: Tensor) -> None:
        if now.kv:
            return
        now.kv = [self._empty(now.view, like, like.dtype) for _ in range(2)]
        if now.backward:
            wide = in_fp32(self._fp32_gradients, now.view.num_slices)
            dtype = torch.promote_types(like.dtype, torch.float32) if wide else like.dtype
            now.gradient = self._empty(now.view, like, dtype)

    def _load(self, use: Use, number: int) -> Any:
        now = self._running
        piece = self._pieces.get((now.view.sequence, use.piece))
        if piece is None:  # a sequence's first slice: nothing to load, but the buffer's last rows may still be leaving
            return self._host.mark()
        return self._copy(now.kv[number], piece.kv, 0, use.num_rows, out=False)

    def _copy(self, buffer: Tensor, at_host: int, start: int, stop: int, out: bool) -> Any:
        """Begin to copy rows of keys and values, or of their gradients; returns the stream position after the copy."""
        region = self._regions[self._running.view.sequence]
        row_bytes = buffer[0, 0].nbytes
        with self._host.copying():
            for number, half in enumerate(buffer):
                first = at_host + (number * buffer.shape[1] + start) * row_bytes
                for device, host in region.pairs(first, half[start:stop].reshape(-1).view(torch.uint8)):
                    (host if out else device).copy_(device if out else host, non_blocking=True)
            return self._host.mark()

    def _new(self, view: SliceView, piece: Piece, k: Tensor) -> _AtHost:
        if view.sequence not in self._regions:
            self._regions[view.sequence] = Region(self._host)
            self._num_rows[view.sequence] = size_class(view.capacity)
        if piece.layer not in self._layers:
            self._layers.append(piece.layer)
        self._like = k.new_empty((0, *k.shape[1:]))
        self._open(self._running, k)
        made = self._pieces[view.sequence, piece] = _AtHost(self._reserve(view, self._running.kv[0]))
        return made

    def _reserve(self, view: SliceView, buffer: Tensor) -> int:
        start = self._regions[view.sequence].reserve(buffer.nbytes)
        self.host_bytes += buffer.nbytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        return start

    def _empty(self, view: SliceView, like: Tensor, dtype: torch.dtype) -> Tensor:
        made = torch.empty((2, self._num_rows[view.sequence], *like.shape[1:]), dtype=dtype, device=like.device)
        self.num_bytes += made.nbytes
        return made

    def _piece(self, layer: int, view: SliceView, part: int) -> _AtHost:
        piece = self._pieces.get((view.sequence, Piece(layer, part)))
        if piece is None:
            raise no_cache(layer, view)
        return piece

    def _drop(self, sequence: int) -> None:
        region = self._regions.pop(sequence, None)
        if region is None:  # dropped before, with all others
            return
        self.host_bytes -= region.num_bytes
        region.give_back()
        del self._num_rows[sequence]
        self._pieces = {key: piece for key, piece in self._pieces.items() if key[0] != sequence}
