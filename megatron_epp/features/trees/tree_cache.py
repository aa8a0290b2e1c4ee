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

from megatron_epp.plan.sizing import sums_in_fp32
from megatron_epp.runtime.attention.core import compact
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import HeadGroup, KVCacheError, SliceView, Tensors
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

    rows: Tensors
    readers: int  # that have not run backward; without backward, forward
    gradients: Tensors = ()

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
                own = self._nodes[node, group] = _Rows(tuple(compact(x[here]) for x in cached), node.num_readers)
                self._num_bytes += own.num_bytes
            elif not self._is_again:
                raise KVCacheError(f"{_where(layer, node)}: attention runs twice in the forward of the tokens at {node.start}")
        return self._gathered(layer, tree, group, [x[at:] for x in cached])

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
                sums = self._nodes[node, group].gradients
                own = tuple((total if heads is None else total[:, heads]) + x for total, x in zip(sums, own, strict=True))
            complete.insert(0, tuple(x.to(grad.dtype) for x, grad in zip(own, grads, strict=True)))
            if is_last:
                self._free(node, group)
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

    def _free(self, node: Node, group: HeadGroup) -> None:
        self._num_bytes -= self._nodes.pop((node, group)).num_bytes

    def _gathered(self, layer: int, tree: TreeView, group: HeadGroup, rest: Sequence[Tensor]) -> Tensors:
        """Return what the queries of a chunk attend to: what several segments read, of each the rest of its prefix and its own
        rows, then the padding's.
        """
        seen = [self._piece(layer, piece, group) for piece in tree.shared]
        for pieces, node in tree.parts:
            seen += (self._piece(layer, piece, group) for piece in pieces)
            seen.append(self._rows_of(layer, node, group).rows)
        every = zip(*seen, rest, strict=True)
        return tuple(parts[0] if len(parts) == 2 and not len(parts[1]) else torch.cat(parts) for parts in every)

    def _piece(self, layer: int, piece: Piece, group: HeadGroup) -> Tensors:
        return tuple(x[piece.rows] for x in self._rows_of(layer, piece.node, group).rows)

    def _add(
        self, layer: int, view: TreeView, piece: Piece, group: HeadGroup, grads: Sequence[Tensor], heads: slice | None
    ) -> None:
        own = self._rows_of(layer, piece.node, group)
        if not own.gradients:
            wide = sums_in_fp32(self.fp32_gradients, view.num_slices)
            own.gradients = tuple(
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32) if wide else x.dtype) for x in own.rows
            )
            self._num_bytes += sum(x.nbytes for x in own.gradients)
        for total, x in zip(own.gradients, grads, strict=True):
            of_heads = total if heads is None else total[:, heads]
            of_heads[piece.rows] += x

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
