"""Layouts of the chunks of a plan whose sequences share prefixes (`Plan.borrowed`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_epp.features.cascade.common_rows import common_rows
from megatron_epp.features.cascade.tree_cascade import cascade_view
from megatron_epp.features.trees.readers import reads_of
from megatron_epp.features.trees.state_cuts import cut_chunks
from megatron_epp.features.trees.tree_cache import Node, Piece, TreeCache, TreeView
from megatron_epp.plan import Chunk, Plan
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkLayout
from megatron_epp.runtime.handover import Stretch, Stretches


def tree_layouts(plan: Plan) -> tuple[ChunkLayout, ...]:
    """Return the layout of every chunk of a plan with shared prefixes."""
    reads, loss_group = reads_of(plan.chunks, plan.borrowed), {c: group for group in plan.loss_groups for c in group}
    readers = Counter(part for parts in reads.values() for part, _ in parts)
    nodes = {segment: Node(*segment, readers[segment]) for segment in reads}
    pieces = {segment: tuple(Piece(nodes[part], stop) for part, stop in parts) for segment, parts in reads.items()}
    most_readers = max(readers.values(), default=0)
    tables = [SegmentTable.build(chunk, plan.padded_tokens(c)) for c, chunk in enumerate(plan.chunks)]
    handed = _stretches(plan, tables)
    views = [
        TreeView.of(tuple((pieces[s], nodes[s]) for s in chunk.segments), most_readers, handed[c])
        for c, chunk in enumerate(plan.chunks)
    ]
    common = [common_rows(chunk.segments, reads) for chunk in plan.chunks]
    return tuple(
        ChunkLayout(table, cascade_view(view, table, rows), loss_group.get(c, ()), cache=TreeCache)
        for c, (view, table, rows) in enumerate(zip(views, tables, common, strict=True))
    )


def _stretches(plan: Plan, tables: Sequence[SegmentTable]) -> list[Stretches]:
    """Return every chunk as layers that hand on a state run it, with its table where none of its segments is cut."""
    every, (chunks, readers) = list[Stretches](), cut_chunks(plan.chunks, plan.borrowed)
    for c, parts in enumerate(chunks):
        is_cut = len(parts) > len(plan.chunks[c].segments)
        tokens = Chunk(tuple(part.tokens for part in parts))
        table = SegmentTable.build(tokens, plan.padded_tokens(c)) if is_cut else tables[c]
        ends = {part.behind for part in parts}
        entered = dict.fromkeys(part.before for part in parts if part.before is not None and part.before not in ends)
        left = {cut: readers[cut] for part in parts if (cut := part.behind) is not None and readers[cut]}
        own = (Stretch(at, before, behind) for at, (_, before, behind) in enumerate(parts) if before or behind)
        every.append(Stretches(table, tuple(own), tuple(entered), left))
    return every
