"""STP (Synergistic Tensor and Pipeline Parallelism, arXiv 2510.27257): exchanges of tensor parallelism behind compute.

The order follows its parts on braided execution blocks and on the schedule, and the authors' code (MICLAB-BUPT/STP).

Kept: two stages per rank in a V, and the phases of the order with its steps of two actions: a forward and a backward of one
stage, a forward and a weight gradient, and in the warm-up two forwards. While one of the two exchanges activations, the other
computes. Changed: microbatches are chunks; sequences with slices need as many more forwards in the warm-up, and two slices of
one sequence are no step, since the second attends to the first.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.overlap.joined import JoinedOrder
from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.rows import LetterRow
from megatron_epp.plan import Action, PlanError
from megatron_epp.planner.order import descending


def stp(batch: Batch) -> Iterator[JoinedOrder]:
    """Yield the order with its steps of two actions. Raises `PlanError` if there are fewer chunks than its phases have."""
    ranks, total, spare = batch.placement.num_ranks, batch.num_chunks, batch.most_slices - 1
    least = 3 * ranks - 1 + spare
    if total < least:
        raise PlanError(
            f"STP needs at least {least} chunks on {ranks} ranks; there are {total}: give it more sequences or fewer ranks"
        )
    rows = []
    for rank in range(ranks):
        above, below = ranks - 1 - rank, rank + 1
        whole = 2 * (total - least) + below
        row = LetterRow(batch.placement.stages(rank), descending(batch.groups))
        row.run("f" * 2 * above + "fF" * (below + spare) + "f" * (below % 2) + "(ff)" * (below // 2) + "(FB)(fW)" * above)
        row.run("".join(("(FX)", "(fx)")[at % 2] for at in range(whole)))
        row.run("".join(("(FB)", "(fb)")[at % 2] for at in range(whole, whole + rank)))
        row.run("x(FB)" * (ranks - 1 + above) + "xX" * (below + spare) + "x" + "WWx" * above + "W" * 2 * rank)
        rows.append(row)
    group_of = {c: group for group in batch.groups for c in group}

    def independent(first: Action, second: Action) -> bool:
        return first.op is not second.op or group_of[first.chunk] != group_of[second.chunk]

    joined = frozenset(pair for row in rows for pair in row.joined if independent(*pair))
    yield JoinedOrder(tuple(tuple(row.actions) for row in rows), joined)
