"""PipeOffload (arXiv 2503.01328, generalised interleaved schedule, selective offload): the longest-lived activations offloaded.

Kept: its generalised interleaved schedule, in which groups of 1 or p/2 to p chunks take turns on the stages of a rank, weight
gradients right after their backwards, and selective offload: a rank's first stage, whose activations live longest, goes first,
then its next, as far as the link has time for. With `Options.offload` they are copied whether or not a cap requires it. The
order follows the authors' code (sail-sg/zero-bubble-pipeline-parallelism), which has what the text leaves open.

Changed: copies are put into gaps of the link by their planned times, while ranks that share a link take fixed turns there;
norms and activation functions are not recomputed to make copies smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.spacing import SPLIT_UNITS, Spacing
from megatron_epp.planner.order import Order


def generalised_interleaved(batch: Batch) -> Iterator[Order]:
    """Yield the order of single chunks, which keeps least, and of groups of half as many as ranks and as many as ranks."""
    ranks, laps = batch.placement.num_ranks, batch.placement.num_chunks
    for group in dict.fromkeys((1, -(-ranks // 2), ranks)):
        yield Spacing.of(ranks, laps, group, SPLIT_UNITS).order(batch.groups, batch.placement)
