"""Layouts of the chunks of a plan whose sequences share prefixes (`Plan.borrowed`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megatron_epp.features.trees.readers import ahead_of
from megatron_epp.features.trees.tree_cache import Node, Piece, TreeCache, TreeView
from megatron_epp.plan import Plan, Segment
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkLayout


def tree_layouts(plan: Plan) -> tuple[ChunkLayout, ...]:
    """Return the layout of every chunk of a plan with shared prefixes."""
    paths, loss_group = _Paths(plan), {c: group for group in plan.loss_groups for c in group}
    views = [paths.view(c) for c in range(len(plan.chunks))]
    return tuple(
        ChunkLayout(SegmentTable.build(chunk, plan.padded_tokens(c)), views[c], loss_group.get(c, ()), cache=TreeCache)
        for c, chunk in enumerate(plan.chunks)
    )


@dataclass(frozen=True)
class _Paths:
    plan: Plan

    @cached_property
    def segments(self) -> dict[int, list[Segment]]:
        """Segments of each sequence, in the order of its tokens."""
        held: dict[int, list[Segment]] = {}
        for segment in sorted(segment for chunk in self.plan.chunks for segment in chunk.segments):
            held.setdefault(segment.sequence, []).append(segment)
        return held

    @cached_property
    def ahead(self) -> dict[Segment, tuple[tuple[Segment, int], ...]]:
        """Segments with the tokens before each segment's own, and up to which token of each it reads."""
        return {
            segment: tuple(ahead_of(segment.sequence, segment.start, self.segments, self.plan.borrowed))
            for chunk in self.plan.chunks
            for segment in chunk.segments
        }

    @cached_property
    def nodes(self) -> dict[Segment, Node]:
        readers = Counter(part for ahead in self.ahead.values() for part, _ in ahead)
        return {segment: Node(*segment, readers[segment]) for segment in self.ahead}

    def view(self, c: int) -> TreeView:
        pieces = tuple(
            (tuple(Piece(self.nodes[part], stop) for part, stop in self.ahead[segment]), self.nodes[segment])
            for segment in self.plan.chunks[c].segments
        )
        return TreeView.of(pieces, max(node.num_readers for node in self.nodes.values()))
