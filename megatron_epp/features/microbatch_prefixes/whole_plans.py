"""Plans of whole microbatches that share prefixes also with each other, and whose losses get the rows of all their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush

from megatron_epp import planner
from megatron_epp.cost.blocks import INPUT, StageCosts
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.whole_microbatches import without_cache
from megatron_epp.features.trees.choice import faster
from megatron_epp.plan import Chunk, Plan
from megatron_epp.plan.problem import Options, Problem

_ROWS_KEPT = 3
"""Bytes of hidden states that the last stage holds of a token besides: its row for those that read it, and in fp32 the sum of
the row's gradients."""


def plan_whole(problem: Problem, costs: PipelineCosts, options: Options) -> Plan:
    """Return the faster plan: of prefixes in common that run once, or of microbatches by themselves."""
    *others, last = costs.stages
    rows = _ROWS_KEPT * costs.hidden_bytes_per_token
    stages = *(_with_bytes(stage, 0.0) for stage in others), _with_bytes(last, rows)
    # All of a microbatch's tokens pass the output layer, also those whose rows others have computed, unless none reads them.
    trained = problem.trained or tuple(
        (-(-(length**2) // (length - each.tokens)),) for length, each in zip(problem.lengths, problem.borrowed, strict=True)
    )

    def plan_of(asked: Problem) -> Plan:
        if not asked.borrowed:
            return planner.plan(asked, without_cache(costs), options)
        # Rows for the output layer are cached as keys are, and host memory is planned for keys and values alone.
        sharing = replace(options, shares=True, kv_offload=False)
        return planner.plan(replace(asked, trained=trained), replace(costs, stages=stages), sharing)

    return faster(problem, costs, options, plan_of)


def _with_bytes(stage: StageCosts, more: float) -> StageCosts:
    """Return a stage that keeps so many bytes of a token more, and keys and values besides what was measured without them."""
    blocks = []
    for block in stage.blocks:
        least = 0.0 if block.kv is None else block.kv.bytes_per_token + block.input_bytes_per_token
        size = max(block.bytes_per_token, least) + (more if block.kind == INPUT else 0.0)
        blocks.append(replace(block, bytes_per_token=size))
    return replace(stage, blocks=tuple(blocks))


def lenders_first(chunks: Iterable[Chunk], problem: Problem) -> tuple[Chunk, ...]:
    """Return microbatches as near to a given order as their sequences' lenders allow, which run ahead of them.

    Every sequence borrows of one with a smaller number, so that there is such an order.
    """
    table = [*chunks]
    at = {segment.sequence: c for c, chunk in enumerate(table) for segment in chunk.segments}
    lenders = [
        {at[problem.borrowed[q].sequence] for q, first, _ in chunk.segments if first} - {c} for c, chunk in enumerate(table)
    ]
    borrowers, arranged = [list[int]() for _ in table], list[Chunk]()
    for c, own in enumerate(lenders):
        for lender in own:
            borrowers[lender].append(c)
    ready = [c for c, own in enumerate(lenders) if not own]
    while ready:
        c = heappop(ready)
        arranged.append(table[c])
        for borrower in borrowers[c]:
            lenders[borrower].remove(c)
            if not lenders[borrower]:
                heappush(ready, borrower)
    return tuple(arranged)
