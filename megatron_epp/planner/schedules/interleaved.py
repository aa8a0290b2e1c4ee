"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2.2): several stages per rank, round the ranks.

Kept: as many chunks as there are ranks on one stage, then on the next, and the warm-up of ``2 (p - rank - 1) + (v - 1) p``
forwards. Changed: microbatches are chunks, slices of a sequence among them, and where slices need more forwards before the
first backward than the warm-up has, it is longer by as many.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan import Action, Op
from megatron_epp.planner.orders.patterns import by_laps, descending
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch
from megatron_epp.planner.schedules.rows import one_each


def interleaved(batch: Batch) -> Iterator[Order]:
    """Yield the order."""
    placement = batch.placement
    ranks, laps = placement.num_ranks, list(range(placement.num_chunks))
    forwards = by_laps(range(batch.num_chunks), ranks, laps)
    backwards = by_laps(descending(batch.groups), ranks, laps[::-1])
    position = {unit: at for at, unit in enumerate(forwards)}
    late = max(position[laps[-1], c] - at for at, (_, c) in enumerate(backwards))
    rows = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        f = [Action(Op.F, stages[lap], c) for lap, c in forwards]
        b = [Action(Op.B, stages[lap], c) for lap, c in backwards]
        rows.append(one_each(f, b, 2 * (ranks - rank - 1) + max(late, laps[-1] * ranks)))
    yield tuple(rows)
