"""KV cache of sequences that share prefixes: every token's rows once, those of a path put together for each pass.

A segment's forward keeps its rows. Those that read them, later slices of its sequence or of others, get them in front of their
own. Backward runs readers first: each adds the gradient of all it has read to the accumulators of the segments that have the
rows, and takes out its own, which is complete because every reader has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.features.offload.host_rows import HostRows
from megatron_epp.plan.sizing import sums_in_fp32
from megatron_epp.runtime.attention.core import compact
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import HeadGroup, KVCacheError, SliceView, Tensors
from megatron_epp.runtime.autograd.saved import observe
from megatron_epp.runtime.handover import Stretches


class Node(NamedTuple):
    """A segment of a tree: tokens ``[start, end)`` of a sequence, which so many other segments read."""

    sequence: int
    start: int
    end: int
    num_readers: int


class Piece(NamedTuple):
    """Tokens of a node up to `stop` without the first ones, a part of the prefix of others, so many of which end there."""

    node: Node
    stop: int
    skipped: int = 0
    num_readers: int = 1

    @property
    def num_rows(self) -> int:
        return self.stop - self.node.start - self.skipped

    @property
    def rows(self) -> slice:
        return slice(self.skipped, self.stop - self.node.start)


@dataclass(frozen=True, slots=True)
class TreeView(SliceView):
    """Window of a chunk on the cache: its segments, each with the pieces of its prefix, from the sequence's first token.

    What is inherited describes the chunk's tokens as one slice that is its sequence's last: all of them are in the cache.
    """

    parts: tuple[tuple[tuple[Piece, ...], Node], ...] = ()
    shared: tuple[Piece, ...] = ()  # of the prefixes of several segments, in front of all others

    @classmethod
    def of(
        cls, parts: tuple[tuple[tuple[Piece, ...], Node], ...], most_readers: int, handed: Stretches | None = None
    ) -> TreeView:
        num_tokens = sum(node.end - node.start for _, node in parts)
        return cls(parts[0][1].sequence, 0, num_tokens, num_tokens, num_tokens, 1 + most_readers, handed, parts)

    @property
    def num_keys(self) -> int:
        """Keys of all segments, their prefixes included."""
        return sum(piece.num_rows for piece in self.shared) + sum(_num_rows(*part) for part in self.parts)


@dataclass(slots=True)
class _Rows:
    """Rows of a node in one layer, ``[tokens, heads, width]`` each, and the sums of their gradients."""

    rows: Tensors  # of no token if they are in host memory
    readers: int  # that have not run backward; without backward, forward
    gradients: Tensors = ()
    host: HostRows | None = None  # that has the rows, and the sums of gradients between actions; None if they stay
    has_sums: bool = False  # the host has some

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.rows, *self.gradients))


@dataclass(slots=True)
class TreeCache(SlicedKVCache):
    """Rows of all nodes of one stage for one iteration."""

    _nodes: dict[tuple[Node, HeadGroup], _Rows] = field(default_factory=dict)
    _is_again: bool = False  # a backward runs, whose recompute appends once more
    _num_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        return self._num_bytes

    @contextmanager
    def _again(self, backward: bool) -> Iterator[None]:
        before, self._is_again = self._is_again, backward
        try:
            yield
        finally:
            self._is_again = before

    def running(self, view: SliceView | None, backward: bool, num_whole: int = 0) -> AbstractContextManager[None]:
        return self._again(backward)

    def parts(self, view: SliceView, heads: int) -> int:
        return 1

    def append(self, layer: int, view: SliceView, cached: Sequence[Tensor], part: int = 0) -> Tensors:
        tree, group, at = _tree(view), HeadGroup(layer, part), 0
        for _, node in tree.parts:
            here = slice(at, at := at + node.end - node.start)
            if (node, group) not in self._nodes:
                self._keep(tree, node, group, tuple(x[here] for x in cached))
            elif not self._is_again:
                raise KVCacheError(f"{_where(layer, node)}: attention runs twice in the forward of the tokens at {node.start}")
        return self._gathered(layer, tree, group, [x[at:] for x in cached], cached)

    def fetch(self, layer: int, view: SliceView, uncached: Sequence[Tensor], part: int = 0) -> Tensors:
        tree, group, inside = _tree(view), HeadGroup(layer, part), dict[Node, int]()
        for pieces in (tree.shared, *(pieces for pieces, _ in tree.parts)):
            for piece in pieces:
                inside[piece.node] = inside.get(piece.node, 0) + piece.num_readers
        for _, node in tree.parts:
            if left := self._rows_of(layer, node, group).readers - inside.get(node, 0):
                raise KVCacheError(
                    f"{_where(layer, node)}: backward of tokens {node.start} to {node.end} is ahead of that of {left} readers"
                )
        return self._gathered(layer, tree, group, uncached)

    def take_gradient(
        self, layer: int, view: SliceView, grads: Sequence[Tensor], part: int = 0, heads: slice | None = None
    ) -> Tensors:
        tree, group, at = _tree(view), HeadGroup(layer, part), _tree(view).num_keys
        rest, complete = tuple(x[at:] for x in grads), list[Tensors]()
        is_last = heads is None or heads.stop == self._rows_of(layer, tree.parts[0][1], group).rows[0].shape[1]

        def add(pieces: tuple[Piece, ...], row: int) -> int:
            for piece in pieces:
                self._add(layer, tree, piece, group, [x[row : row + piece.num_rows] for x in grads], heads)
                row += piece.num_rows
                if is_last:
                    self._nodes[piece.node, group].readers -= piece.num_readers
            return row

        add(tree.shared, 0)
        for pieces, node in reversed(tree.parts):  # a segment's readers in this chunk stand behind it
            at -= _num_rows(pieces, node)
            row = add(pieces, at)
            own = tuple(x[row : row + node.end - node.start] for x in grads)
            if node.num_readers:
                sums = self._sums(layer, tree, node, group)
                own = tuple((total if heads is None else total[:, heads]) + x for total, x in zip(sums, own, strict=True))
            complete.insert(0, tuple(x.to(grad.dtype) for x, grad in zip(own, grads, strict=True)))
            if is_last:
                self._free(node, group)
        if is_last:
            for pieces in (tree.shared, *(pieces for pieces, _ in tree.parts)):
                self._put_away([piece.node for piece in pieces], group)
        return tuple(torch.cat(each) for each in zip(*complete, rest, strict=True))

    def release(self, layer: int, view: SliceView, part: int = 0) -> None:
        tree, group = _tree(view), HeadGroup(layer, part)
        pieces = [*tree.shared, *(piece for pieces, _ in tree.parts for piece in pieces)]
        for piece in pieces:
            self._nodes[piece.node, group].readers -= piece.num_readers
        for node in dict.fromkeys((*(piece.node for piece in pieces), *(node for _, node in tree.parts))):
            if not self._nodes[node, group].readers:
                self._free(node, group)

    def assert_empty(self) -> None:
        SlicedKVCache.assert_empty(self)
        if self._nodes:
            left = sorted({(group.layer, node.sequence) for node, group in self._nodes})
            raise KVCacheError(f"caches of (layer, sequence) {left} were never freed")

    def _keep(self, tree: TreeView, node: Node, group: HeadGroup, rows: Tensors) -> None:
        """Keep rows of a node, or copy them to the host if it has those of the node's sequence."""
        host = self.offloaded
        if isinstance(host, HostRows) and node.num_readers and node.sequence in host.sequences:
            sums = [x.numel() * self._sum_type(tree, x).itemsize for x in rows] if host.trains else []
            host.reserve(node.sequence, (node, group), [*(x.nbytes for x in rows), *sums])
            host.copy_rows(node.sequence, (node, group), tuple(map(compact, rows)), out=True)
            empty = tuple(x.new_empty((0, *x.shape[1:])) for x in rows)
            self._nodes[node, group] = _Rows(empty, node.num_readers, host=host)
        else:
            own = self._nodes[node, group] = _Rows(tuple(map(compact, rows)), node.num_readers)
            self._num_bytes += own.num_bytes

    def _free(self, node: Node, group: HeadGroup) -> None:
        own = self._nodes.pop((node, group))
        self._num_bytes -= own.num_bytes
        if own.host is not None:
            own.host.discard(node.sequence, (node, group))

    def _gathered(
        self, layer: int, tree: TreeView, group: HeadGroup, rest: Sequence[Tensor], cached: Sequence[Tensor] = ()
    ) -> Tensors:
        """Return what the queries of a chunk attend to: what several segments read, of each the rest of its prefix and its own
        rows, then the padding's. In a forward `cached` are the chunk's rows.
        """
        parts = [(piece.node, piece.rows) for piece in tree.shared]
        for pieces, node in tree.parts:
            parts += ((piece.node, piece.rows) for piece in pieces)
            parts.append((node, slice(0, node.end - node.start)))
        if any(self._rows_of(layer, node, group).host is not None for node, _ in parts):
            return self._loaded(tree, group, rest, cached, parts)
        seen = [tuple(x[rows] for x in self._nodes[node, group].rows) for node, rows in parts]
        every = zip(*seen, rest, strict=True)
        return tuple(x[0] if len(x) == 2 and not len(x[1]) else torch.cat(x) for x in every)

    def _loaded(
        self,
        tree: TreeView,
        group: HeadGroup,
        rest: Sequence[Tensor],
        cached: Sequence[Tensor],
        parts: Sequence[tuple[Node, slice]],
    ) -> Tensors:
        """Return what `_gathered` does where some rows are in host memory, each of which is loaded once."""
        there, at = dict[tuple[Node, slice], Tensors](), 0
        for _, node in tree.parts if cached else ():
            first, at = at, at + node.end - node.start
            there[node, slice(0, at - first)] = tuple(x[first:at] for x in cached)
        num_rows, at = sum(rows.stop - rows.start for _, rows in parts), 0
        gathered = tuple(x.new_empty((num_rows + len(x), *x.shape[1:])) for x in rest)
        for node, rows in parts:
            own, into = self._nodes[node, group], tuple(x[at : at + rows.stop - rows.start] for x in gathered)
            at += rows.stop - rows.start
            known = [(has.start, x) for (other, has), x in there.items() if other == node and has.stop >= rows.stop]
            source = next((tuple(y[rows.start - first :] for y in x) for first, x in known if first <= rows.start), None)
            if source is None and own.host is not None:
                own.host.copy_rows(node.sequence, (node, group), into, out=False, start=rows.start)
                there[node, rows] = into
                continue
            for x, y in zip(into, source or tuple(y[rows.start :] for y in own.rows), strict=True):
                x.copy_(y[: len(x)])
        for x, y in zip(gathered, rest, strict=True):
            x[at:] = y
        return gathered

    def _add(
        self, layer: int, view: TreeView, piece: Piece, group: HeadGroup, grads: Sequence[Tensor], heads: slice | None
    ) -> None:
        for total, x in zip(self._sums(layer, view, piece.node, group), grads, strict=True):
            of_heads = total if heads is None else total[:, heads]
            of_heads[piece.rows] += x

    def _sums(self, layer: int, view: TreeView, node: Node, group: HeadGroup) -> Tensors:
        """Return the sums of a node's gradients, zeros at first, or as the host has them."""
        own = self._rows_of(layer, node, group)
        if not own.gradients:
            size = node.end - node.start
            own.gradients = tuple(x.new_zeros((size, *x.shape[1:]), dtype=self._sum_type(view, x)) for x in own.rows)
            self._num_bytes += sum(x.nbytes for x in own.gradients)
            observe()  # they may be gone again when a tensor is saved or released next
            if own.host is not None and own.has_sums:
                own.host.copy_rows(node.sequence, (node, group), own.gradients, out=False, first=len(own.rows))
        return own.gradients

    def _put_away(self, nodes: Sequence[Node], group: HeadGroup) -> None:
        for node in nodes:
            own = self._nodes.get((node, group))
            if own is not None and own.host is not None and own.gradients:
                own.host.copy_rows(node.sequence, (node, group), own.gradients, out=True, first=len(own.rows))
                self._num_bytes -= sum(x.nbytes for x in own.gradients)
                own.gradients, own.has_sums = (), True

    def _sum_type(self, view: SliceView, x: Tensor) -> torch.dtype:
        wide = sums_in_fp32(self.fp32_gradients, view.num_slices)
        return torch.promote_types(x.dtype, torch.float32) if wide else x.dtype

    def _rows_of(self, layer: int, node: Node, group: HeadGroup) -> _Rows:
        if (own := self._nodes.get((node, group))) is None:
            raise KVCacheError(f"{_where(layer, node)}: the tokens from {node.start} to {node.end} are not in the cache")
        return own


def _tree(view: SliceView) -> TreeView:
    assert isinstance(view, TreeView)
    return view


def _num_rows(pieces: Sequence[Piece], node: Node) -> int:
    return sum(piece.num_rows for piece in pieces) + node.end - node.start


def _where(layer: int, node: Node) -> str:
    return f"layer {layer}, sequence {node.sequence}"
