"""GPipe (Huang et al. 2019, arXiv 1811.06965, section 2.3): all forwards, then all backwards.

Kept: the order. Changed: microbatches are chunks of unequal length, slices of a sequence among them, and recompute is what the
cap requires instead of everything.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.plan import Op
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.patterns import actions


def gpipe(batch: Batch) -> Iterator[Order]:
    """Yield the order: backwards in the reverse order of forwards."""
    table = range(batch.num_chunks)
    yield tuple((*actions(Op.F, rank, table), *actions(Op.B, rank, table[::-1])) for rank in range(batch.placement.num_ranks))
