"""Stock 1F1B of whole sequences: each padded to the context length, or packed up to it."""

from __future__ import annotations

from megatron_epp.cost import Costs
from megatron_epp.planner.baselines.contest import Contest, context_tokens, pack_whole
from megatron_epp.planner.baselines.seq1f1b import enter_uniform
from megatron_epp.planner.chunks.chunker import round_up, whole_sequences
from megatron_epp.planner.decisions import Decisions, Planner
from megatron_epp.planner.fit import fit_recompute
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.order import arranged, stand_in
from megatron_epp.planner.orders.warm_up import Schedule
from megatron_epp.planner.problem import Options, Problem, require_one_stage_per_rank, require_whole
from megatron_epp.planner.tables import tabulate


def padded_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """One sequence per micro-batch, in batch order, each padded to `options.context`; the least uniform recompute that fits.

    The plan says so by its token multiple, which is the context length: padding takes time and memory, and travels in the
    messages, like any token. Only attention is cheaper than in the original: padding attends to nothing here.

    Raises:
        InfeasibleError: a row does not fit the cap even with all layers recomputed, or a sequence is longer than the context,
            or the context than `chunk_tokens`.
    """
    contest = Contest(problem, costs, options)
    row = context_tokens(problem, options)
    require_whole(options, row)
    enter_uniform(contest, whole_sequences(problem.lengths), row)
    return contest.result()


def packed_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Rows of whole sequences up to `options.context` tokens (first fit, longest first); the least uniform recompute that fits.
    With `options.chunk_tokens` no row is longer than that.

    Kinder than the original: rows are not padded to the context, and sequences of a row do not attend to each other.

    Raises:
        InfeasibleError: a row does not fit the cap even with all layers recomputed, or a sequence is longer than the context or
            `chunk_tokens`.
    """
    contest = Contest(problem, costs, options)
    row = context_tokens(problem, options)
    require_whole(options, round_up(max(problem.lengths), problem.token_multiple))
    if options.chunk_tokens is not None:
        row = min(row, options.chunk_tokens // problem.token_multiple * problem.token_multiple)
    enter_uniform(contest, pack_whole(problem.lengths, row))
    return contest.result()


def baseline(schedule: Schedule) -> Planner:
    """A planner for whole sequences, one per chunk in batch order; recompute as the caps ask for.

    It ignores `slices`, and refuses `chunk_tokens` below the longest.
    """

    def planner(problem: Problem, costs: Costs, options: Options) -> Decisions:
        require_one_stage_per_rank(problem, options)
        require_whole(options, round_up(max(problem.lengths), problem.token_multiple))
        chunks = arranged(whole_sequences(problem.lengths), problem.loss_groups)
        modes = options.modes(costs)
        tables = tabulate(chunks, problem, costs, modes)
        order = schedule(stand_in(chunks, problem.loss_groups), problem.num_stages, problem.forward_only)
        fit = fit_recompute(order, tables, problem.cap_bytes, options)
        if fit.recompute_steps is None:
            raise infeasible(problem, costs, options, fit.needed_bytes)
        return Decisions(chunks, order, fit.recompute_steps, modes)

    return planner
