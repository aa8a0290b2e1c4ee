"""1F1B over slices that take equal time: Seq1F1B's order (arXiv 2406.03488) of TeraPipe's slices (2102.07988)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.order import Order


def one_f_one_b(batch: Batch) -> Iterator[Order]:
    """Yield Seq1F1B's order of a chunk table."""
    yield seq1f1b_order(batch.groups, batch.placement.num_ranks)
