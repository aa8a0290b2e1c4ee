"""kFkB (Ada-Grouper, arXiv 2303.01675, section 3): k forwards and k backwards in turn, so that late messages find other work.

Kept: a warm-up k times as long as in 1F1B, and retuning: the k of least time under the memory cap is chosen anew for every
batch, from passes and messages as the costs have them. Costs may be measured at start-up, or the passes learnt in the first
iterations. Changed: the paper measures messages again and again during the run; here a link that becomes slower in a run
changes nothing until there are new costs. Microbatches do not shrink as k grows, and backwards of slices run last slice first.
With k = 1 it is 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.plan import Action, Op
from megatron_epp.planner.order import Order, descending
from megatron_epp.planner.orders.patterns import actions

GROUPS = (1, 2, 3, 4, 6, 8)
"""Values of k that are tried."""


def kfkb(batch: Batch) -> Iterator[Order]:
    """Yield an order for every k that leaves forwards to be interleaved."""
    ranks = batch.placement.num_ranks
    for k in GROUPS:
        if k == 1 or k * ranks <= batch.num_chunks:
            yield tuple(_row(batch, rank, k) for rank in range(ranks))


def _row(batch: Batch, rank: int, k: int) -> tuple[Action, ...]:
    """Return a rank's actions: ``k * (ranks - rank)`` forwards alive at most, and as many more as a sequence has slices."""
    forwards = actions(Op.F, rank, range(batch.num_chunks))
    backwards = actions(Op.B, rank, descending(batch.groups))
    warm_up = k * (batch.placement.num_ranks - rank) + batch.most_slices - 1
    row = forwards[:warm_up]
    for start in range(0, batch.num_chunks, k):
        row += backwards[start : start + k]
        row += forwards[warm_up + start : warm_up + start + k]
    return tuple(row)
