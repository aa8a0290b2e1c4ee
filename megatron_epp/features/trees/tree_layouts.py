"""Layouts of the chunks of a plan whose sequences share prefixes (`Plan.borrowed`)."""

from __future__ import annotations

from collections import Counter

from megatron_epp.features.trees.common_rows import common_rows
from megatron_epp.features.trees.readers import reads_of
from megatron_epp.features.trees.tree_cache import Node, Piece, TreeCache, TreeView
from megatron_epp.features.trees.tree_cascade import cascade_view
from megatron_epp.plan import Plan
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkLayout


def tree_layouts(plan: Plan) -> tuple[ChunkLayout, ...]:
    """Return the layout of every chunk of a plan with shared prefixes."""
    reads, loss_group = reads_of(plan.chunks, plan.borrowed), {c: group for group in plan.loss_groups for c in group}
    readers = Counter(part for parts in reads.values() for part, _ in parts)
    nodes = {segment: Node(*segment, readers[segment]) for segment in reads}
    pieces = {segment: tuple(Piece(nodes[part], stop) for part, stop in parts) for segment, parts in reads.items()}
    most_readers = max(readers.values(), default=0)
    views = [TreeView.of(tuple((pieces[s], nodes[s]) for s in chunk.segments), most_readers) for chunk in plan.chunks]
    tables = [SegmentTable.build(chunk, plan.padded_tokens(c)) for c, chunk in enumerate(plan.chunks)]
    common = [common_rows(chunk.segments, reads) for chunk in plan.chunks]
    return tuple(
        ChunkLayout(table, cascade_view(view, table, rows), loss_group.get(c, ()), cache=TreeCache)
        for c, (view, table, rows) in enumerate(zip(views, tables, common, strict=True))
    )
