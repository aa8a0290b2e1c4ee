"""1F1B (PipeDream-Flush, arXiv 2006.09503, section 3.1), over slices of sequences Seq1F1B (2406.03488, section 3).

Kept: the order, with ``p - rank - 2 + n`` forwards before the first pair, for n slices. Changed: chunks are of unequal length,
and chunk tables and recompute are chosen for every batch; `seq1f1b` has the paper's chunks of one size and uniform recompute.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan import Op
from megatron_epp.planner.orders.patterns import descending, one_each
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch
from megatron_epp.planner.schedules.rows import actions


def one_f_one_b(batch: Batch) -> Iterator[Order]:
    """Yield the order."""
    ranks, backwards = batch.placement.num_ranks, descending(batch.groups)
    yield tuple(
        one_each(
            actions(Op.F, rank, range(batch.num_chunks)), actions(Op.B, rank, backwards), ranks - rank - 2 + batch.most_slices
        )
        for rank in range(ranks)
    )
