"""GPipe (Huang et al. 2019, arXiv 1811.06965, section 2.3): all forwards, then all backwards. With several stages on each rank
it is Breadth-First pipeline parallelism (arXiv 2211.05953, section 3): all chunks on one stage of a rank, then on its next.

Kept: the order, with which Breadth-First gathers sharded weights once per stage. Changed: microbatches are chunks of unequal
length, slices of a sequence among them, and recompute is what the cap requires instead of everything. Weights are not sharded
here, so of Breadth-First only its bubble and its memory are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.plan import Action, Op
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.patterns import actions


def gpipe(batch: Batch) -> Iterator[Order]:
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
