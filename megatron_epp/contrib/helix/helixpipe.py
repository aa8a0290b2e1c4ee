"""HelixPipe (arXiv 2507.00394, sections 4.1 and 4.2): attention of several microbatches on all ranks at once, two-fold FILO.

A block is the end of one layer, from attention's output on, and the beginning of the next, up to its queries, keys and values.
Block ``s`` is on rank ``s mod p``, the last one with the head on the first rank. Attention behind block ``s`` of the
microbatches ``j`` = 0 to p - 1 is on the ranks ``s + j + 1 mod p``: so it takes p ranks at once, and the last of these ranks
has the next microbatch when the block's rank is done with all. Each ``j`` stands for two microbatches, which alternate, so that
messages of one are under way while the other computes. Backwards come in the reverse order of all forwards.

Kept: the placement and the order. Changed: microbatches are chunks of whole sequences of any length, and the last round may
have fewer than 2 p; what recomputes is what the cap requires, a layer without its attention, but the last block always runs in
its backward alone; the residual goes straight to the next block instead of with queries, keys and values. Left out: shipping
weights in place of queries, keys and values; a chunked MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import batched
from typing import Any

from megatron_epp.contrib.helix.attention_operations import A, G
from megatron_epp.contrib.helix.costs import SeparateAttentionCosts, cut_at_attention, with_separate_attention
from megatron_epp.contrib.papers.fixed_order import Batch, FixedOrder
from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.order import Order

FOLDS = 2
"""Microbatches that alternate."""

_BACKWARD = {Op.F: Op.B, A: G}


class HelixLayout(Layout):
    """Blocks from one layer's attention to the next, of a layer each but for the first, which ends with the first attention."""

    @staticmethod
    def of(num_layers: int, num_ranks: int) -> HelixLayout:
        """Return the layout of a model.

        Raises:
            EppError: the ranks do not have equally many layers.
        """
        count, more = divmod(num_layers, num_ranks)
        if more or not count:
            raise EppError(f"separate attention needs equally many layers on every rank; {num_ranks} ranks share {num_layers}")
        return HelixLayout((0, *(1,) * num_layers), Placement("ring", num_ranks, count))

    @property
    def is_movable(self) -> bool:
        return False

    def costs_of(self, costs: Any, profile: Any) -> Any:
        return with_separate_attention(cut_at_attention(costs, profile))


def helixpipe(batch: Batch, folds: int = FOLDS) -> Iterator[Order]:
    """Yield the order.

    Raises `PlanError` if the costs have attention in the stages, or a chunk is a slice.
    """
    if not isinstance(batch.costs, SeparateAttentionCosts):
        raise PlanError("HelixPipe needs costs of separate attention: `with_separate_attention`")
    if batch.most_slices > 1:
        raise PlanError(f"HelixPipe runs whole sequences; a sequence is in {batch.most_slices} slices")
    ranks = range(batch.placement.num_ranks)
    forwards = [list(_forwards(batch, rank, folds)) for rank in ranks]
    backwards = ([Action(_BACKWARD[op], site, c) for op, site, c in reversed(row)] for row in forwards)
    yield tuple((*forward, *backward) for forward, backward in zip(forwards, backwards, strict=True))


def _forwards(batch: Batch, rank: int, folds: int) -> Iterator[Action]:
    """Yield the forwards of a rank, of blocks and of attention.

    Rounds of ``folds * p`` microbatches follow each other without a gap: the first block of a round has the place of the last
    block of the round before it.
    """
    ranks, last = batch.placement.num_ranks, batch.placement.num_stages - 1
    rounds = [list(batched(round, folds)) for round in batched(range(batch.num_chunks), folds * ranks)]
    for turn in range(len(rounds) * last + 1):
        done, site = divmod(turn, last)
        if turn % ranks == rank:
            for j in range(ranks):
                for stage, number in ((last, done - 1), (0, done)) if site == 0 else ((site, done),):
                    yield from (Action(Op.F, stage, c) for c in _at(rounds, number, j))
        yield from (Action(A, site, c) for c in _at(rounds, done, (rank - 1 - turn) % ranks))


def _at(rounds: list[list[tuple[int, ...]]], number: int, j: int) -> tuple[int, ...]:
    """Return the chunks of a place in a round; none if there is no such round, or it is short."""
    return rounds[number][j] if 0 <= number < len(rounds) and j < len(rounds[number]) else ()


@dataclass(frozen=True, slots=True)
class HelixOrder(FixedOrder):
    """Planner of an order over blocks: stages that are cut inside attention, with one stage more on the first rank."""

    @property
    def stages(self) -> str:
        return "one per layer"

    def layout(self, num_layers: int, num_ranks: int, count: int = 2) -> HelixLayout:
        return HelixLayout.of(num_layers, num_ranks)

    def placement(self, problem: Problem, options: Options) -> Placement:
        helix = Placement("ring", problem.num_ranks, problem.num_stages // problem.num_ranks)
        if helix.rank_of == problem.placement:
            return helix
        raise PlanError(
            f"planner {options.planner!r} needs two or more stages on each rank, and one stage more on the first; the stages "
            f"are on ranks {list(problem.placement)}"
        )
