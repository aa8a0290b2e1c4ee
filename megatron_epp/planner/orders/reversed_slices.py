"""Order of SlimPipe (2504.14519, section 4): a sequence's slices on all stages of a rank, then the next; backwards reversed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.plan.placement import Placement
from megatron_epp.planner.order import Order, slice_groups
from megatron_epp.planner.orders.patterns import by_laps, is_looped, looped, one_each, running
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables


@dataclass(frozen=True, slots=True)
class ReversedSlices:
    """Order rule for looped placements: backwards of a sequence reverse its forwards. Elsewhere it is list scheduling."""

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        """Order all actions. Arguments as in `OrderRule.order`."""
        made = (reversed_slices(slice_groups(chunks), looped(problem)),) if is_looped(problem) else ()
        return running(made, chunks, tables, problem)


def reversed_slices(groups: Sequence[range], placement: Placement) -> Order:
    """Order the actions of every rank, with a warm-up of ``n v + 2 (p - 1 - rank)`` slices: n of the longest sequence, on v
    stages of each of p ranks.

    The paper's sequences have at least as many slices as there are ranks: of shorter ones, as many together as it takes stand
    for one.

    Args:
        groups: `slice_groups` of the chunk table.
        placement: looped.
    """
    ranks, laps = placement.num_ranks, list(range(placement.num_chunks))
    each = [by_laps(run, _group_size(len(run), ranks), laps) for run in _runs(groups, ranks)]
    alive = max(map(len, each))
    forwards, backwards = list(chain.from_iterable(each)), [unit for units in each for unit in reversed(units)]
    rows = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        f = [Action(Op.F, stages[lap], c) for lap, c in forwards]
        b = [Action(Op.B, stages[lap], c) for lap, c in backwards]
        rows.append(one_each(f, b, alive + 2 * (ranks - 1 - rank) - 1))
    return tuple(rows)


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
