"""Parts of orders that repeat a pattern, as papers have them, for one stage or several on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from megatron_epp.plan import Action, Op
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.kernels.codes import BACKWARD, FORWARD, KIND_BITS
from megatron_epp.planner.order import Groups, Order, descending
from megatron_epp.planner.orders.warm_up import merged, order_of


def actions(op: Op, stage: int, chunks: Sequence[int]) -> list[Action]:
    """Return an operation of one stage for several chunks, in the order in which they run."""
    return [Action(op, stage, c) for c in chunks]


def looped(problem: Problem) -> Placement:
    return Placement("looped", problem.num_ranks, problem.num_stages // problem.num_ranks)


def is_looped(problem: Problem) -> bool:
    """Return True if the placement is looped and the batch is trained on."""
    return problem.placement == looped(problem).rank_of and not problem.forward_only


def by_laps(chunks: Sequence[int], size: int, laps: Sequence[int], least: int | None = None) -> list[tuple[int, int]]:
    """List laps and chunks: `size` chunks on the first lap, the same on the next, and so on; then the next chunks.

    Fewer leftover chunks than `least`, by default `size`, join the last group: one of fewer than the ranks would deadlock.
    """
    starts = range(0, max(1, len(chunks) - (least or size) + 1), size)
    stops = [*starts[1:], len(chunks)]
    return [(lap, c) for start, stop in zip(starts, stops, strict=True) for lap in laps for c in chunks[start:stop]]


def one_warm_up(groups: Groups, own: Placement, together: int | None = None) -> Order:
    """Order looped stages with one warm-up per rank: ``2 (p - rank - 1) + (v - 1) n`` forwards (2104.04473, section 2.2.2).

    Where slices need more forwards before the first backward, it has as many more. `together` chunks n, by default as many as
    ranks, run on a stage before the rank goes on to its next (Megatron's ``microbatch_group_size_per_vp_stage``).
    """
    ranks, laps = own.num_ranks, list(range(own.num_chunks))
    size = together or ranks
    forwards = by_laps(range(sum(map(len, groups))), size, laps, ranks)
    backwards = by_laps(descending(groups), size, laps[::-1], ranks)
    position = {unit: at for at, unit in enumerate(forwards)}
    late = max(position[laps[-1], c] - at for at, (_, c) in enumerate(backwards))
    warm_up = [2 * (ranks - rank - 1) + max(late, laps[-1] * size) for rank in range(ranks)]
    return of_laps(forwards, backwards, own, [range(first + 1, first + 1 + len(backwards)) for first in warm_up])


def of_laps(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], own: Placement, ahead: Sequence[Sequence[int]]
) -> Order:
    """Order looped stages with equal laps and chunks (`by_laps`) on all ranks, `ahead` forwards before each backward."""
    num_chunks, rows = len(forwards) // own.num_chunks, []
    (laps_f, chunks_f), (laps_b, chunks_b) = (np.array(each, dtype=np.int64).T for each in (forwards, backwards))
    for rank in range(own.num_ranks):
        firsts = np.array(own.stages(rank)) * num_chunks
        f, b = (firsts[laps_f] + chunks_f) << KIND_BITS | FORWARD, (firsts[laps_b] + chunks_b) << KIND_BITS | BACKWARD
        rows.append(merged(f, b, ahead[rank]))
    return order_of(rows, num_chunks)


def one_each(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Run the warm-up, then one forward and one backward in turn, beginning with a forward, then what is left."""
    pairs = zip_longest(forwards[warm_up:], backwards)
    return (*forwards[:warm_up], *(action for pair in pairs for action in pair if action is not None))
