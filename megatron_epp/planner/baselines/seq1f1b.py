"""Seq1F1B with chunks of one fixed size and uniform recompute: the strongest rival InfiniPipe measures itself against."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan import Action, Chunk, Op, Segment
from megatron_epp.planner.baselines.contest import Contest
from megatron_epp.planner.baselines.rows import chunk_sizes, first_fit, split
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.orders.warm_up import Order, slice_groups
from megatron_epp.planner.problem import Options, Problem


def seq1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Cut what is longer than the chunk size, pack the rest up to it; the least uniform recompute that fits; the best size.

    A real run fixes one size for all batches; here every batch gets its own best of about ten, which favours the baseline.
    With `options.chunk_tokens` that is the size.

    Args:
        problem: the batch, the pipeline and its memory caps.
        costs: time and memory of every stage.
        options: the user's settings.

    Raises:
        InfeasibleError: no size fits the cap, even with all layers recomputed.
    """
    contest = Contest(problem, costs, options)
    for size in chunk_sizes(problem, options):
        chunks = fixed_size_chunks(problem.lengths, size)
        order = seq1f1b_order(slice_groups(chunks), problem.num_stages, problem.forward_only)
        contest.enter_uniform(chunks, order)
    return contest.result()


def fixed_size_chunks(lengths: Sequence[int], size: int) -> tuple[Chunk, ...]:
    """Slices of `size` tokens; short sequences fill up the last slices and then chunks of their own, first fit in batch order.

    Sequences with the most slices come first.
    """
    slices = [split(q, length, size) for q, length in enumerate(lengths) if length > size]
    slices.sort(key=len, reverse=True)
    short = [(q, length) for q, length in enumerate(lengths) if length <= size]
    bins = first_fit(short, size, [parts[-1].num_tokens for parts in slices])
    whole = [tuple(Segment(q, 0, lengths[q]) for q in held) for held in bins]
    for parts, riders in zip(slices, whole, strict=False):
        parts[-1] = Chunk(parts[-1].segments + riders)
    return (*(chunk for parts in slices for chunk in parts), *map(Chunk, whole[len(slices) :]))


def seq1f1b_order(groups: Sequence[Sequence[int]], num_stages: int, forward_only: bool = False) -> Order:
    """Seq1F1B's order: ``num_stages - rank - 2 + n`` warm-up forwards, then one forward, one backward, then what is left.

    With one chunk per group this is 1F1B. Most chunks alive on a rank: ``num_stages - rank - 1 + n``.

    Args:
        groups: for each sequence, its chunks in token order; n is the most chunks of any. Batched chunks stand alone.
        num_stages: of the pipeline, one per rank.
        forward_only: leave the backwards out.

    Returns:
        The actions of every rank: forwards group by group, ascending in it; backwards group by group, descending in it.
    """
    forward = [c for group in groups for c in group]
    backward = [c for group in groups for c in reversed(group)]
    window = max(map(len, groups))
    orders = []
    for stage in range(num_stages):
        actions: list[Action] = []
        run = len(forward) if forward_only else min(len(forward), num_stages - stage - 2 + window)
        actions += (Action(Op.F, stage, c) for c in forward[:run])
        for done, c in enumerate(() if forward_only else backward):
            if run + done < len(forward):
                actions.append(Action(Op.F, stage, forward[run + done]))
            actions.append(Action(Op.B, stage, c))
        orders.append(tuple(actions))
    return tuple(orders)
