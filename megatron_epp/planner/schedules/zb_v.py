"""ZB-V (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6): two stages per rank in a V, memory of 1F1B, no bubble.

Kept: the greedy order in units of time, in which F, B and W take one each: a rank prefers a backward, then a forward while it
keeps less than ``2 p`` forwards of a stage, then the weight gradient that has waited longest. Changed: a unit is a chunk of any
length. Sequences with slices have as many more forwards alive, since the first backward follows the forwards of all slices.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.planner.orders.unit_times import in_unit_times
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch


def zb_v(batch: Batch) -> Iterator[Order]:
    """Yield the order."""
    yield in_unit_times(batch.groups, batch.placement)
