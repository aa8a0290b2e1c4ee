"""Stock 1F1B, every sequence padded to the context length."""

from __future__ import annotations

from megatron_epp.cost import Costs
from megatron_epp.planner.baselines.contest import Contest
from megatron_epp.planner.baselines.rows import context_tokens
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.chunks.chunker import whole_sequences
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Options, Problem, require_whole


def padded_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """One sequence per micro-batch, in batch order, each padded to `options.context`; the least uniform recompute that fits.

    The plan says so by its token multiple, which is the context length: padding takes time and memory, and travels in the
    messages, like any token. Only attention is cheaper than in the original: padding attends to nothing here.

    Args:
        problem: the batch, the pipeline and its memory caps.
        costs: time and memory of every stage.
        options: the user's settings.

    Raises:
        InfeasibleError: a row does not fit the cap even with all layers recomputed, or a sequence is longer than the context,
            or the context than `chunk_tokens`.
    """
    contest = Contest(problem, costs, options)
    row = context_tokens(problem, options)
    require_whole(problem, options, row)
    chunks = whole_sequences(problem.lengths)
    order = seq1f1b_order([[c] for c in range(len(chunks))], problem.num_stages, problem.forward_only)
    contest.enter_uniform(chunks, order, token_multiple=row)
    return contest.result()
