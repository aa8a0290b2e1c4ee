"""ZB-V (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6): two stages per rank in a V, memory of 1F1B.

Kept: the placement, the memory of 1F1B, and ranks that wait as long as the first forward takes to the last of them, where F, B
and W take equally long. Changed: the paper searches for an order; here it is the building block that its authors gave later
(V-ZB, 2405.15362), repeated and moved like the blocks of V-Min and V-Half. Their order lets no rank wait between its first and
last action; here the first ranks wait there, and no rank ends later for it. A unit is a chunk of any length. The first backward
of a sequence follows the forwards of all its slices.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.v_blocks import repeated
from megatron_epp.planner.order import Order


def zb_v(batch: Batch) -> Iterator[Order]:
    yield from repeated("V-ZB", batch)
