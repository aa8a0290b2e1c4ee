"""DualPipeV (DualPipe's repository, 2025; DualPipe: DeepSeek-V3, arXiv 2412.19437, section 3.2.1): DualPipe cut in the middle.

No weights are on two ranks: the stages of DualPipe's PP ranks are on half as many, two on each. Kept: the phases of the order
and the memory. Changed: a forward and a backward that run as one there run one after the other here, and microbatches are
chunks; sequences with slices need as many more forwards in the warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.rows import LetterRow
from megatron_epp.plan import PlanError
from megatron_epp.planner.order import Order, descending


def dualpipe_v(batch: Batch) -> Iterator[Order]:
    """Yield the order. Raises `PlanError` if there are fewer chunks than its phases have."""
    ranks, total, spare = batch.placement.num_ranks, batch.num_chunks, batch.most_slices - 1
    if total < 2 * ranks - 1 + spare:
        raise PlanError(
            f"DualPipeV needs at least {2 * ranks - 1 + spare} chunks on {ranks} ranks; there are {total}: give it more "
            "sequences or fewer ranks"
        )
    rows = []
    for rank in range(ranks):
        above, below = ranks - 1 - rank, rank + 1
        row = LetterRow(batch.placement.stages(rank), descending(batch.groups))
        row.run("f" * 2 * above + "fF" * (below + spare) + "BWF" * above)
        row.run("fXFx" * (total - ranks - above - spare) + "XFx" * above)
        row.run("Xx" * spare + "".join(("Xx" if at < below else "Bb")[at % 2] for at in range(2 * below)))
        row.run("Wb" * above + "W" * below)
        rows.append(tuple(row.actions))
    yield tuple(rows)
