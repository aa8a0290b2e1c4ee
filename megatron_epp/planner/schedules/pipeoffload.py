"""PipeOffload (arXiv 2503.01328): interleaved stages at equal distances, and activations with the longest lifetimes offloaded.

Kept: its generalised interleaved schedule, in which groups of 1 or p/2 to p chunks take turns on the stages of a rank, weight
gradients right after their backwards, and selective offload: a rank's first stage, whose activations live longest, goes first,
then its next, as far as the link has time for. With `Options.offload` they are copied whether or not a cap requires it. The
order follows the authors' code (sail-sg/zero-bubble-pipeline-parallelism), which has what the text leaves open.

Changed: copies are put into gaps of the link by their planned times, while ranks that share a link take fixed turns there;
norms and activation functions are not recomputed to make copies smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.planner.orders.spacing import SPLIT_UNITS, Spacing
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.copies import Shares
from megatron_epp.planner.schedules.fixed_order import Batch
from megatron_epp.planner.tables import Tables


def generalised_interleaved(batch: Batch) -> Iterator[Order]:
    """Yield the order of single chunks, which keeps least, and of groups of half as many as ranks and as many as ranks."""
    ranks, laps = batch.placement.num_ranks, batch.placement.num_chunks
    for group in dict.fromkeys((1, -(-ranks // 2), ranks)):
        yield Spacing.of(ranks, laps, group, SPLIT_UNITS).order(batch.groups, batch.placement)


def longest_lived_shares(tables: Tables) -> Shares:
    """Return 1 for the first stages of each rank, as many as are copied both ways while the rank computes, and 0 for others.

    If there is no time for one, its share is what there is time for.
    """
    found: list[list[float]] = [[0.0] * len(tables.message_us) for _ in tables.rank_of]
    for stages in tables.stages_of:
        left_us = sum(sum(tables.forward_us[stage]) + sum(tables.backward_us[stage]) for stage in stages)
        for stage in stages:
            both_us = sum(2 * tables.host_us(tables.kept_bytes(stage, c, 0)) for c in range(len(tables.message_us)))
            if both_us > left_us and stage != stages[0]:
                break
            found[stage] = [min(1.0, left_us / both_us) if both_us > 0.0 else 0.0] * len(tables.message_us)
            left_us -= both_us
    return found
