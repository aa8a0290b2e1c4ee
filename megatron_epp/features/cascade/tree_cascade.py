"""Attention on rows that several segments of a chunk read, in one call for the queries of all of them ("cascade").

Rows in common stand once in front of the others. A kernel runs without its mask on them, for the queries of all that read them,
and as ever on the rest; both outputs are merged by their log-sum-exp. With merged outputs and log-sum-exps, backward gives each
call's exact share of the gradients, that of the rows in common summed over their readers (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby
from operator import attrgetter

import torch
from torch import Tensor

from megatron_epp.features.cascade.common_rows import CommonRows
from megatron_epp.features.trees.tree_cache import Node, Piece, TreeView
from megatron_epp.plan import Segment
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION, AttentionCase, Kernel
from megatron_epp.runtime.attention.kernels.base import Gradients, Saved
from megatron_epp.runtime.attention.segments import SegmentTable, Tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Level:
    """A call on rows in common: the rows among the keys, and the chunk's tokens that read them, in the order of its table."""

    keys: slice
    tokens: tuple[slice, ...]
    table: SegmentTable
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def queries(self, device: torch.device) -> slice | Tensor:
        if len(self.tokens) == 1:
            return self.tokens[0]
        if device not in self._on_device:
            index = torch.cat([torch.arange(each.start, each.stop) for each in self.tokens])
            pinned = index.pin_memory() if device.type == "cuda" else index
            self._on_device[device] = pinned.to(device, non_blocking=True)
        return self._on_device[device]


@dataclass(frozen=True)
class CascadeTable(SegmentTable):
    """Layout of a chunk's attention, in which the keys of every level are in front of those that its own offsets count."""

    levels: tuple[Level, ...] = ()

    @property
    def num_shared(self) -> int:
        return self.levels[-1].keys.stop

    @property
    def calls(self) -> tuple[SegmentTable, ...]:
        return (self, *(level.table for level in self.levels))


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeView(TreeView):
    """View of a chunk with rows in common, and the view and layout of a call by `cascaded`, in which they are `joined`."""

    joined: TreeView
    table: CascadeTable

    def call(self, kernel: Kernel, table: SegmentTable, like: Tensors) -> tuple[TreeView, Kernel, SegmentTable]:
        if table.window is None and _serves(kernel, kernels.case_of(*like)):
            return self.joined, cascaded(kernel), self.table
        return self, kernel, table


def cascade_view(view: TreeView, table: SegmentTable, common: Sequence[CommonRows]) -> TreeView:
    """Return the view of a chunk with these rows in common, the view itself without any."""
    if not common:
        return view
    own, taken, levels, shared = [pieces for pieces, _ in view.parts], [0] * len(view.parts), list[Level](), list[Piece]()
    for _, each in groupby(common, attrgetter("level")):
        groups = [*each]
        tokens = tuple(slice(*table.query_starts[at : at + 2]) for group in groups for at in group.members)
        sizes = [(sum(table.segments[at].num_tokens for at in group.members), group.stop - group.start) for group in groups]
        query_starts, key_starts = (tuple(accumulate(column, initial=0)) for column in zip(*sizes, strict=True))
        segments = tuple(Segment(number, keys - queries, keys) for number, (queries, keys) in enumerate(sizes))
        unmasked, first = SegmentTable(segments, query_starts, key_starts, causal=False), levels[-1].keys.stop if levels else 0
        levels.append(Level(slice(first, first + unmasked.key_starts[-1]), _joined(tokens), unmasked))
        for group in groups:
            shared += _in_common(group, own)
            for at in group.members:
                taken[at] = group.stop
    parts = tuple((_behind(end, pieces), node) for end, (pieces, node) in zip(taken, view.parts, strict=True))
    ends = taken + [0] * (len(table.segments) - len(taken))  # of the padding
    rest = tuple(Segment(s.sequence, s.start - end, s.end - end) for end, s in zip(ends, table.segments, strict=True))
    key_starts = tuple(accumulate((segment.end for segment in rest), initial=0))
    joined = replace(view, parts=parts, shared=tuple(shared))
    of_view = {field.name: getattr(view, field.name) for field in fields(TreeView)}
    return CascadeView(**of_view, joined=joined, table=CascadeTable(rest, table.query_starts, key_starts, levels=tuple(levels)))


def _joined(tokens: Sequence[slice]) -> tuple[slice, ...]:
    runs: list[slice] = []
    for each in tokens:
        if runs and runs[-1].stop == each.start:
            each = slice(runs.pop().start, each.stop)
        runs.append(each)
    return tuple(runs)


def _in_common(group: CommonRows, own: Sequence[tuple[Piece, ...]]) -> list[Piece]:
    """Return the pieces of rows in common, each read by the members that read no more of its node."""
    ends: dict[Node, list[int]] = {}
    for at in group.members:
        for node, stop, *_ in own[at]:
            ends.setdefault(node, []).append(stop)
    within = [piece for piece in own[group.members[0]] if piece.stop > group.start and piece.node.start < group.stop]
    return [
        Piece(node, min(stop, group.stop), max(0, group.start - node.start), sum(end <= group.stop for end in ends[node]))
        for node, stop, *_ in within
    ]


def _behind(end: int, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    return tuple(piece._replace(skipped=max(0, end - piece.node.start)) for piece in pieces if piece.stop > end)


@functools.cache
def cascaded(kernel: Kernel) -> Kernel:
    """Return a kernel for a `CascadeTable`, by one that also runs without its mask."""

    def forward(q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float) -> tuple[Tensor, Saved]:
        assert isinstance(table, CascadeTable)
        out, saved = kernel.forward(q, k[table.num_shared :], v[table.num_shared :], table, scale)
        log_sums = kernel.log_sums(saved)
        for level in table.levels:
            own = level.queries(q.device)
            more, its = kernel.forward(q[own], k[level.keys], v[level.keys], level.table, scale)
            before, behind = log_sums[:, own], kernel.log_sums(its)
            both = torch.logaddexp(before, behind)
            share, of_more = ((x - both).exp().t().unsqueeze(-1) for x in (before, behind))
            out[own] = torch.addcmul(out[own] * share, more, of_more).to(out.dtype)
            log_sums[:, own] = both
        return out, saved

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, table: SegmentTable, scale: float
    ) -> Gradients:
        assert isinstance(table, CascadeTable)
        seen = k[table.num_shared :], v[table.num_shared :]
        dq, *rest = kernel.backward(grad, q, *seen, out, saved, table, scale)
        of_keys: list[Sequence[Tensor]] = []
        for level in table.levels:
            own = level.queries(q.device)
            seen, of_own = (k[level.keys], v[level.keys]), kernel.of_heads(saved, slice(None), own)
            more, *shared = kernel.backward(grad[own], q[own], *seen, out[own], of_own, level.table, scale)
            dq[own] += more
            of_keys.append(shared)
        dk, dv = map(torch.cat, zip(*of_keys, rest, strict=True))
        return dq, dk, dv

    return replace(kernel, forward=forward, backward=backward)


_SAMPLE = CascadeTable(
    *((Segment(0, 5, 38), Segment(1, 0, 1), Segment(2, 0, 40)), (0, 33, 34, 74), (0, 38, 39, 79)),
    levels=(
        Level(
            slice(0, 70),
            (slice(0, 33), slice(34, 74)),
            SegmentTable((Segment(0, -3, 70),), (0, 73), (0, 70), causal=False),
        ),
        Level(slice(70, 83), (slice(34, 74),), SegmentTable((Segment(0, -27, 13),), (0, 40), (0, 13), causal=False)),
    ),
)
"""Layout for verification: two segments behind 70 rows in common, 13 more of one of them, and one that reads none of both."""


@functools.cache
def _serves(kernel: Kernel, case: AttentionCase) -> bool:
    """Return whether a kernel passes verification with rows in common. Its log-sum-exp is merged in what it saves itself."""
    if kernel is EXACT_ATTENTION:
        return True
    exact, case = cascaded(EXACT_ATTENTION), case._replace(has_sinks=True)
    if failure := kernels.failed_verification(cascaded(kernel), case, exact, _SAMPLE):
        logger.warning("%s does not run on rows in common, which are gathered for each segment: %s", kernel.name, failure)
    return failure is None
