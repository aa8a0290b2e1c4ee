"""Stock 1F1B, whole sequences packed up to the context length."""

from __future__ import annotations

from megatron_epp.cost import Costs
from megatron_epp.planner.baselines.contest import Contest
from megatron_epp.planner.baselines.rows import context_tokens, pack_whole
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.chunks.chunker import round_up
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Options, Problem, require_whole


def packed_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Rows of whole sequences up to `options.context` tokens (first fit, longest first); the least uniform recompute that fits.
    With `options.chunk_tokens` no row is longer than that.

    Kinder than the original: rows are not padded to the context, and sequences of a row do not attend to each other.

    Args:
        problem: the batch, the pipeline and its memory caps.
        costs: time and memory of every stage.
        options: the user's settings.

    Raises:
        InfeasibleError: a row does not fit the cap even with all layers recomputed, or a sequence is longer than the context or
            `chunk_tokens`.
    """
    contest = Contest(problem, costs, options)
    row = context_tokens(problem, options)
    require_whole(problem, options, round_up(max(problem.lengths), problem.token_multiple))
    if options.chunk_tokens is not None:
        row = min(row, options.chunk_tokens // problem.token_multiple * problem.token_multiple)
    chunks = pack_whole(problem.lengths, row)
    order = seq1f1b_order([[c] for c in range(len(chunks))], problem.num_stages, problem.forward_only)
    contest.enter_uniform(chunks, order)
    return contest.result()
