"""SlimPipe (arXiv 2504.14519, section 4): slices of a sequence on all stages of a rank, then the next; backwards reversed.

Kept: the order and its warm-up of ``n v + 2 (p - 1 - rank)`` slices. Changed: slices take equal time instead of having equal
length, so no attention is exchanged between ranks; the vocabulary is divided over the ranks where the costs have it in shards.
The paper's sequences have at least as many slices as there are ranks: of shorter ones, as many together as it takes stand for
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from megatron_epp.plan import Action, Op
from megatron_epp.planner.orders.patterns import by_laps, one_each
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch


def slimpipe(batch: Batch) -> Iterator[Order]:
    """Yield the order."""
    placement = batch.placement
    ranks, laps = placement.num_ranks, list(range(placement.num_chunks))
    each = [by_laps(run, _group_size(len(run), ranks), laps) for run in _runs(batch.groups, ranks)]
    alive = max(map(len, each))
    forwards, backwards = list(chain.from_iterable(each)), [unit for units in each for unit in reversed(units)]
    rows = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        f = [Action(Op.F, stages[lap], c) for lap, c in forwards]
        b = [Action(Op.B, stages[lap], c) for lap, c in backwards]
        rows.append(one_each(f, b, alive + 2 * (ranks - 1 - rank) - 1))
    yield tuple(rows)


def _runs(groups: Sequence[range], least: int) -> list[range]:
    """Join neighbours so that none but a single one has fewer than `least` chunks."""
    runs: list[range] = []
    for group in groups:
        if runs and (len(runs[-1]) < least or (group.stop == groups[-1].stop and len(group) < least)):
            runs[-1] = range(runs[-1].start, group.stop)
        else:
            runs.append(group)
    return runs


def _group_size(slices: int, ranks: int) -> int:
    """Return the smallest divisor of a number of slices that is at least the number of ranks; all slices if there is none."""
    return next((size for size in range(ranks, slices) if slices % size == 0), slices)
