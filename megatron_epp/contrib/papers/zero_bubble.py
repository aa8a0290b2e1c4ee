"""ZB-H1, ZB-H2 and ZB-V (Zero Bubble Pipeline Parallelism, arXiv 2401.10241): weight gradients fill the bubbles of 1F1B.

Kept: H1 (section 2) has the memory of 1F1B and weight gradients that wait for as many backwards as there are ranks before; H2
has twice the warm-up, so that no rank waits between its first and its last action. ZB-V (section 6) has two stages per rank in
a V and the memory of 1F1B, and ranks wait as long as the first forward takes to the last of them, where F, B and W take equally
long.

Changed: the paper's heuristic places weight gradients by measured times; here their place in the order is fixed. Its optimizer
does not wait for all ranks, ours does. For ZB-V the paper searches for an order; here it is the building block that its authors
gave later (V-ZB, 2405.15362), repeated and moved like the blocks of V-Min and V-Half. Their order lets no rank wait between its
first and last action; here the first ranks wait there, and no rank ends later for it. A unit is a chunk of any length. The
first backward of a sequence follows the forwards of all its slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.rows import with_waiting
from megatron_epp.contrib.papers.v_blocks import repeated
from megatron_epp.plan import Op
from megatron_epp.planner.order import Order, descending
from megatron_epp.planner.orders.patterns import actions, one_each


def in_bubbles(times: int, batch: Batch) -> Iterator[Order]:
    """Yield 1F1B with weight gradients.

    Args:
        times: weight gradients that wait on each rank, and forwards that it runs ahead of its first backward's own, in H1's.
    """
    ranks, backwards = batch.placement.num_ranks, descending(batch.groups)
    rows = []
    for rank in range(ranks):
        f, b = actions(Op.F, rank, range(batch.num_chunks)), actions(Op.B, rank, backwards)
        row = one_each(f, b, times * (ranks - rank - 1) + batch.most_slices - 1)
        rows.append(tuple(with_waiting(row, times * rank)))
    yield tuple(rows)


zb_h1, zb_h2 = partial(in_bubbles, 1), partial(in_bubbles, 2)
zb_v = partial(repeated, "V-ZB")
