"""SlimPipe (arXiv 2504.14519, section 4): slices of a sequence on all stages of a rank, then the next; backwards reversed.

Kept: slices of equal length, at least as many as ranks, the order, and its warm-up of ``n v + 2 (p - 1 - rank)`` slices. The
vocabulary is divided over the ranks where the costs have it in shards (operations S and T). Changed: lengths differ, so all
sequences are cut at the same tokens as the longest, and short ones are packed to no more tokens than a slice. No attention is
exchanged between ranks, so a slice late in a sequence takes longer than an early one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from megatron_epp.contrib.papers.fixed_order import CHUNKS_PER_RANK, Batch, ChunkTable
from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Action, Op, PlanError, Remedy
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.patterns import by_laps, one_each


def slimpipe(batch: Batch) -> Iterator[Order]:
    yield reversed_slices(batch.groups, batch.placement)


def even_slices(problem: Problem, costs: Costs, options: Options) -> Iterator[ChunkTable]:
    """Yield tables whose slices have equal length: several multiples of the ranks, or the number of slices asked for.

    Raises:
        PlanError: the longest sequence has, or is to have, fewer slices than there are ranks.
    """
    slicer, ranks, longest = Slicer.of(problem, costs, options.chunk_tokens), problem.num_ranks, max(problem.lengths)
    most, least = -(-longest // problem.token_multiple), -(-longest // slicer.token_cap)
    asked = max(options.slices, least) if options.slices is not None else ranks
    if min(asked, most) < ranks:
        raise _too_few(min(asked, most), problem)
    counts = [asked]
    if options.slices is None:
        grains = (slicer.grain(chunks=share * ranks).slices for share in CHUNKS_PER_RANK)
        counts = [max(least, ranks * max(1, round(slices / ranks))) for slices in grains]
    for count in dict.fromkeys(min(count, most) for count in counts):
        yield slicer.equal_length_table(count)


def _too_few(slices: int, problem: Problem) -> PlanError:
    """Return the refusal of a batch that is cut into fewer slices than there are ranks."""
    ranks, longest, multiple = problem.num_ranks, max(problem.lengths), problem.token_multiple
    said = (
        f"SlimPipe needs at least {ranks} slices of the longest sequence on {ranks} ranks; its {longest} tokens have {slices}"
    )
    if longest <= (ranks - 1) * multiple:  # more slices than that it cannot have
        return PlanError(f"{said}, in multiples of {multiple}: give it longer sequences or fewer ranks")
    return PlanError(said, Remedy("raise", "slices", ranks), Remedy("lower", "num_stages"))


def reversed_slices(groups: Sequence[range], placement: Placement) -> Order:
    """Order the actions of every rank, with a warm-up of ``n v + 2 (p - 1 - rank)`` slices: n of the longest sequence, on v
    stages of each of p ranks.

    The paper's sequences have at least as many slices as there are ranks: of shorter ones, as many together as it takes stand
    for one.

    Args:
        groups: `slice_groups` of the chunk table.
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
