"""ChunkFlow (arXiv 2503.02356, Algorithms 1 and 2, Figures 2 and 5 to 7): chunks of one size, the last K of a sequence kept.

Kept: sequences longer than the chunk size C are cut into dependent chunks of C, the others packed into as few standalone chunks
as first fit finds (Algorithm 1); of a sequence's chunks the last K keep their activations, earlier ones run their forward twice
(Algorithm 2); every chunk is a microbatch of a 1F1B that knows which chunks depend on each other; C and K by grid search.

Changed: C and K are searched for every batch, where the paper fixes them for a run, which favours the baseline. Long sequences
run first, and a rank runs as many more forwards ahead as the first sequence has chunks, which shortens the bubble of the
paper's example from 47.8 % to 42.9 %. The second forward of a chunk is no pass through the pipeline of its own: each rank
recomputes just ahead of its backward, all layers one by one, so it keeps every layer's input and needs the workspace of one
layer, where the original keeps only the stage's input.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.baselines.contest import Contest, chunk_sizes, fixed_size_chunks, own_recompute_only
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.warm_up import elastic_1f1b


def chunkflow(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Chunk size C and retain budget K by grid search, state-aware 1F1B.

    With `options.chunk_tokens` that is C. The largest K that fits counts, since more retained is never slower.

    Args:
        problem, costs, options: as `planner.plan` takes them.

    Raises:
        InfeasibleError: no C fits the cap with K = 1.
    """
    own_recompute_only(options)
    contest = Contest(problem, costs, options)
    for size in chunk_sizes(problem, options):
        chunks = fixed_size_chunks(problem.lengths, size, standalone=True)
        tables = contest.tables(chunks)
        order = elastic_1f1b(chunks, problem.num_stages, problem.forward_only)
        most = max(map(len, slice_groups(chunks)))
        for retain in budgets(most) if not problem.forward_only else [most]:
            # More retained is never slower, so the first that fits is this size's best.
            if contest.enter(Decisions(chunks, order, recompute_all_but_last(chunks, tables.num_layers, retain)), tables):
                break
    return contest.result()


def budgets(most: int) -> list[int]:
    """Values of K worth trying where no sequence has more chunks than `most`, falling: that, and powers of two below."""
    return sorted({min(1 << power, most) for power in range(MOST_CHUNKS.bit_length())}, reverse=True)


def recompute_all_but_last(chunks: Sequence[Chunk], num_layers: Sequence[int], retain: int) -> RecomputeSteps:
    """Return recomputed layers ``[stage][chunk]``: all of a stage's, but for the last `retain` chunks of each sequence."""
    retained = {c for group in slice_groups(chunks) for c in group[-retain:]}
    return [[0 if c in retained else count for c in range(len(chunks))] for count in num_layers]
