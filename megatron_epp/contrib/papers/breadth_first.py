"""Breadth-First pipeline parallelism (arXiv 2211.05953, section 3): all chunks on one stage of a rank, then on its next.

Kept: the order, with which sharded weights are gathered once per stage. Changed: weights are not sharded here, so only its
bubble and its memory are compared; slices of a sequence run as chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.plan import Action, Op
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.patterns import actions


def breadth_first(batch: Batch) -> Iterator[Order]:
    """Yield the order: backwards in the reverse order of forwards."""
    table, rows = range(batch.num_chunks), []
    for rank in range(batch.placement.num_ranks):
        stages, row = batch.placement.stages(rank), list[Action]()
        for stage in stages:
            row += actions(Op.F, stage, table)
        for stage in reversed(stages):
            row += actions(Op.B, stage, table[::-1])
        rows.append(tuple(row))
    yield tuple(rows)
