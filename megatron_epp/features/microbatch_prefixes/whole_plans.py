"""Plans of whole microbatches that share prefixes also with each other, and whose losses get the rows of all their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_epp import planner
from megatron_epp.cost.blocks import INPUT, BlockCosts
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.features.trees.choice import faster
from megatron_epp.plan import Chunk, Plan
from megatron_epp.plan.problem import Options, Problem

_ROWS_KEPT = 3
"""Bytes of hidden states that the last stage holds of a token besides: its row for those that read it, and in fp32 the sum of
the row's gradients."""


def plan_whole(problem: Problem, costs: PipelineCosts, options: Options) -> Plan:
    """Return the faster plan: of prefixes in common that run once, or of microbatches by themselves."""
    rows = _ROWS_KEPT * costs.hidden_bytes_per_token

    def keeping(block: BlockCosts, more: float) -> BlockCosts:
        """Return a block that keeps so much more, and keys and values in addition to what was measured without them."""
        least = 0.0 if block.kv is None else block.kv.bytes_per_token + block.input_bytes_per_token
        return replace(block, bytes_per_token=more * (block.kind == INPUT) + max(block.bytes_per_token, least))

    more = [0.0] * (len(costs.stages) - 1) + [rows]
    pairs = zip(costs.stages, more, strict=True)
    kept = tuple(replace(stage, blocks=tuple(keeping(block, own) for block in stage.blocks)) for stage, own in pairs)
    sharing = replace(costs, stages=kept)
    # All of a microbatch's tokens pass the output layer, also those whose rows others have computed, unless none reads them.
    trained = problem.trained or tuple(
        (-(-(length**2) // (length - each.tokens)),) for length, each in zip(problem.lengths, problem.borrowed, strict=True)
    )

    def made(asked: Problem) -> Plan:
        if not asked.borrowed:
            return planner.plan(asked, costs, options)
        return planner.plan(replace(asked, trained=trained), sharing, replace(options, shares=True))

    return faster(problem, costs, options, made)


def lenders_first(chunks: Iterable[Chunk], problem: Problem) -> tuple[Chunk, ...]:
    """Return microbatches in an order as near to the given one as their sequences' lenders allow, which run ahead of them.

    Every sequence borrows of one with a smaller number, so that there is such an order.
    """
    table = [*chunks]
    at = {segment.sequence: c for c, chunk in enumerate(table) for segment in chunk.segments}
    arranged: dict[int, None] = {}

    def put(c: int) -> None:
        for segment in table[c].segments:
            lender, tokens = problem.borrowed[segment.sequence]
            if tokens and at[lender] != c and at[lender] not in arranged:
                put(at[lender])
        arranged[c] = None

    for c in range(len(table)):
        if c not in arranged:
            put(c)
    return tuple(table[c] for c in arranged)
