"""TeraPipe (arXiv 2102.07988, section 3.3): slices by dynamic programming, all forwards, then all backwards.

Kept: the latency ``sum(t) + (p - 1) max(t)`` of slices, the dynamic program that makes it least, and GPipe's order
over slices. Changed: lengths differ, so all sequences are cut at the same tokens, and short ones are packed instead of forming
slices of several sequences. Times are the slowest stage's, without messages. Recompute is what the cap requires; the
paper has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_epp.contrib.papers.fixed_order import ChunkTable
from megatron_epp.contrib.papers.partition import Times, least_latency
from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost.model import Costs
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunks.chunker import slowest_line

POSITIONS = 256
"""Number of tokens at which slices may end, equally far apart in time. The paper has every eighth of 2,048 tokens."""


def slices_of_least_latency(problem: Problem, costs: Costs, options: Options) -> Iterator[ChunkTable]:
    """Yield one chunk table: with the slices asked for, which take equal time, or of least latency."""
    slicer = Slicer.of(problem, costs, options.chunk_tokens)
    if options.slices is not None:
        yield slicer.table(slicer.grain(slices=options.slices))
        return
    ends = np.array([0, *slicer.slice_ends(POSITIONS)], dtype=np.int64)
    times_us, sums_us = _times(problem, costs, ends)
    times_us[(ends <= ends[:, None]) | (ends - ends[:, None] > slicer.token_cap)] = np.inf
    chosen = least_latency(times_us, problem.num_stages, sums_us)
    longest_us = max(slicer.slice_us(int(ends[a]), int(ends[b])) for a, b in zip([0, *chosen[:-1]], chosen, strict=True))
    yield slicer.table_from_ends([int(ends[at]) for at in chosen], longest_us)


def _times(problem: Problem, costs: Costs, ends: NDArray[np.int64]) -> tuple[Times, Times]:
    """Compute the time of a slice of the longest sequence, and the sum over the batch of the slices between the same tokens.

    Sequences that are not cut share the fixed time of one chunk.

    Args:
        ends: tokens at which slices may begin and end.

    Returns:
        both in microseconds, ``[begin][end]``.
    """
    line, lengths = slowest_line(problem, costs)[0], np.array(problem.lengths, dtype=np.int64)

    def prefix_us(tokens: NDArray[np.int64]) -> Times:
        return np.asarray(line.device_us(tokens, tokens * (tokens + 1) // 2) - line.fixed_us, dtype=np.float64)

    times_us = np.asarray(line.launched(line.fixed_us + prefix_us(ends) - prefix_us(ends)[:, None]))
    cut = prefix_us(np.minimum(ends[:, None], lengths)).sum(axis=1)
    longer = (lengths > ends[:, None]).sum(axis=1)
    done_us = (prefix_us(lengths) * (lengths <= ends[:, None])).sum(axis=1)
    sums_us = cut + (longer * (line.fixed_us - prefix_us(ends)) - done_us)[:, None]
    sums_us[0] -= line.fixed_us * np.maximum(len(lengths) - longer - 1, 0)
    return times_us, sums_us
