"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2.2): several stages per rank, round the ranks.

Kept: as many chunks as there are ranks on one stage, then on the next, and the warm-up of ``2 (p - rank - 1) + (v - 1) p``
forwards. Changed: microbatches are chunks, slices of a sequence among them, and where slices need more forwards before the
first backward than the warm-up has, it is longer by as many.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.patterns import one_warm_up


def interleaved(batch: Batch) -> Iterator[Order]:
    yield one_warm_up(batch.groups, batch.placement)
