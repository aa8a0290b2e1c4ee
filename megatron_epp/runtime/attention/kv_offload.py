"""Caches of keys and values that are at the host between uses, so that sequences may be longer than the device has room for.

Attention runs by groups of heads, *pieces*: while one runs, the keys and values of the next arrive in a second buffer. In
backward, the gradient of a piece's prefix arrives beside its kernel, is added to, and goes back beside the next one's. So the
device holds three pieces however many layers there are. Heads do not mix inside attention: results are those of all heads at
once, to the bit.
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
    """A piece of a sequence's cache: where its keys, and behind them its values, start, and as much again of their gradient."""

    kv: int
    gradient: int | None = None
    filled: int = 0
    """Keys and values are there up to here."""
    taken_from: int | None = None
    """Gradients have been handed out from here on."""


@dataclass(slots=True)
class _Running:
    """The action that runs, and the buffers it has on the device, ``[2, rows, heads, channels]`` each."""

    view: SliceView
    backward: bool
    ahead: LookAhead
    kv: list[Tensor]
    gradient: Tensor | None = None
    arriving: Any = None
    """The place on the copy stream behind which the gradient's buffer can be used."""


class HostedCaches:
    """The hosted caches of one stage in one iteration. What they offer to attention is what `KVRelay` does.

    Args:
        host: where they are.
        sequences: whose they are.
        fp32_gradients: see `KVRelay`.

    Attributes:
        num_bytes: on the device now.
        host_bytes: at the host now.
        host_peak_bytes: most of it at one time.
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
        """Around a forward or backward of a slice.

        Args:
            view: the slice.
            backward: whether it is one.
            num_whole: layers, from the stage's first on, that run attention again in it.
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
        """Groups of heads that attention is to run by, one after the other."""
        self._num_parts = head_parts(kv_heads)
        return self._num_parts

    def append(self, layer: int, view: SliceView, k: Tensor, v: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """As `KVRelay.append`, of a group of heads. Groups come first to last."""
        use = Use(Piece(layer, part), view.start)
        piece = self._pieces.get((view.sequence, use.piece))
        if piece is None and view.start == 0:
            piece = self._new(view, use.piece, k)
        check_forward(layer, view, 0 if piece is None else piece.filled)
        assert piece is not None  # checked
        buffer, end = self._buffer(use, k), view.start + k.shape[0]
        buffer[0, view.start : end], buffer[1, view.start : end] = k, v  # with what lies beside the slice
        if piece.filled < view.stop:
            self._copy(buffer, piece.kv, view.start, view.stop, out=True)
            piece.filled = view.stop
        return buffer[0, :end], buffer[1, :end]

    def keys_and_values(
        self, layer: int, view: SliceView, k_beside: Tensor, v_beside: Tensor, part: int
    ) -> tuple[Tensor, Tensor]:
        """As `KVRelay.keys_and_values`, of a group of heads, ahead of its backward. Groups come last to first."""
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
        """As `KVRelay.take_gradient`, of a group of heads, or of some of that."""
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
        """Nothing yet: caches of a sequence go together, at the end of the action that needs them last."""

    def clear(self) -> None:
        """Drop every cache."""
        for sequence in list(self._regions):
            self._drop(sequence)

    def assert_empty(self) -> None:
        """Raise `RelayError` if a cache outlived its iteration."""
        if self._regions:
            raise RelayError(f"hosted caches of sequences {sorted(self._regions)} were never freed")

    def _uses(self, view: SliceView, backward: bool, num_whole: int) -> Iterator[Use]:
        """What attention will ask for in an action, in order, as far as layers have been seen."""
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
        """The buffer with what is asked for in it. What is asked for next is on its way into the other."""
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
        """Begin to copy rows of keys and of values, or of their gradients; returns the place on the copy stream behind that."""
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
