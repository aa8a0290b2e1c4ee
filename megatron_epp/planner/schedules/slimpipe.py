"""SlimPipe (arXiv 2504.14519, section 4): slices of a sequence on all stages of a rank, then the next; backwards reversed.

Kept: the order and its warm-up of ``n v + 2 (p - 1 - rank)`` slices. Changed: slices take equal time instead of having equal
length, so no attention is exchanged between ranks; the vocabulary is divided over the ranks where the costs have it in shards.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.planner.orders.reversed_slices import reversed_slices
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch


def slimpipe(batch: Batch) -> Iterator[Order]:
    """Yield the order."""
    yield reversed_slices(batch.groups, batch.placement)
