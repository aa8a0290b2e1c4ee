"""ZB-H1 and ZB-H2 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2): weight gradients fill the bubbles of 1F1B.

Kept: H1 has the memory of 1F1B and weight gradients that wait for as many backwards as there are ranks before; H2 has twice the
warm-up, so that no rank waits between its first and its last action. Changed: the paper's heuristic places weight gradients by
measured times; here their place in the order is fixed. Its optimizer does not wait for all ranks, ours does.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.rows import with_waiting
from megatron_epp.plan import Op
from megatron_epp.planner.order import Order, descending
from megatron_epp.planner.orders.patterns import actions, one_each


def zb_h1(batch: Batch) -> Iterator[Order]:
    ranks = batch.placement.num_ranks
    yield _order(batch, [ranks - rank - 1 for rank in range(ranks)], list(range(ranks)))


def zb_h2(batch: Batch) -> Iterator[Order]:
    ranks = batch.placement.num_ranks
    yield _order(batch, [2 * (ranks - rank - 1) for rank in range(ranks)], [2 * rank for rank in range(ranks)])


def _order(batch: Batch, ahead: list[int], waiting: list[int]) -> Order:
    """Return 1F1B with weight gradients.

    Args:
        ahead: forwards that each rank runs ahead of its first backward's own.
        waiting: weight gradients that wait on each rank.
    """
    backwards = descending(batch.groups)
    rows = []
    for rank, (more, held) in enumerate(zip(ahead, waiting, strict=True)):
        row = one_each(
            actions(Op.F, rank, range(batch.num_chunks)), actions(Op.B, rank, backwards), more + batch.most_slices - 1
        )
        rows.append(tuple(with_waiting(row, held)))
    return tuple(rows)
