"""1F1B (PipeDream-Flush, arXiv 2006.09503, section 3.1) over slices of sequences: Seq1F1B (2406.03488, section 3).

Two planners have this order. `seq1f1b` is the paper's: chunks of one size and uniform recompute. `1f1b-sliced`
(`contrib/papers/sliced_1f1b.py`) keeps the order alone: chunks take equal time, and recompute is chosen for every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, Op
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.baselines.contest import Contest, chunk_sizes, fixed_size_chunks
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import uniform_steps
from megatron_epp.planner.order import Order, arranged, descending, slice_groups
from megatron_epp.planner.orders.patterns import actions, one_each
from megatron_epp.planner.tables import tabulate


def seq1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Cut what is longer than the chunk size, pack the rest up to it; the least uniform recompute that fits; the best size.

    A real run fixes one size for all batches; here every batch gets its own best of about ten, which favours the baseline.
    Raises `InfeasibleError` if no size fits the cap, even with all layers recomputed.
    """
    contest = Contest(problem, costs, options)
    for size in chunk_sizes(problem, options):
        enter_uniform(contest, fixed_size_chunks(problem.lengths, size))
    return contest.result()


def enter_uniform(contest: Contest, chunks: tuple[Chunk, ...], token_multiple: int | None = None) -> None:
    """Judge a table with the same number of recomputed layers everywhere: the smallest that fits, or the one asked for."""
    problem = contest.problem if token_multiple is None else replace(contest.problem, token_multiple=token_multiple)
    chunks = arranged(chunks, problem.loss_groups)
    tables = tabulate(chunks, problem, contest.costs)
    order = seq1f1b_order(slice_groups(chunks, problem.loss_groups), problem.num_stages, problem.forward_only)
    fixed = 0 if problem.forward_only else contest.options.recompute
    for count in range(max(tables.num_layers) + 1) if fixed == "auto" else (fixed,):
        if contest.enter(Decisions(chunks, order, uniform_steps(tables, count), token_multiple=token_multiple), tables):
            break


def seq1f1b_order(groups: Sequence[Sequence[int]], num_stages: int, forward_only: bool = False) -> Order:
    """Seq1F1B's order: ``num_stages - rank - 2 + n`` warm-up forwards, then one forward, one backward, then what is left.

    `groups` has each sequence's chunks in token order, and n is the most of any; batched chunks stand alone, and with these
    only it is 1F1B. Forwards ascend in a group, backwards descend. A rank has at most ``num_stages - rank - 1 + n`` chunks
    alive.
    """
    window = max(map(len, groups))
    ascending = [c for group in groups for c in group]
    backwards = [] if forward_only else descending(groups)
    rows = ((actions(Op.F, stage, ascending), actions(Op.B, stage, backwards)) for stage in range(num_stages))
    return tuple(one_each(*row, num_stages - stage - 2 + window) for stage, row in enumerate(rows))
