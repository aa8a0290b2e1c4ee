"""Choice of what is shared: between a plan with shared prefixes and one of separate sequences, and among replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_epp.cost.model import Costs
from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Plan
from megatron_epp.plan.chunk import NOTHING_BORROWED
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunks.chunker import Chunker

LEAST_SHARE = 0.02
"""Share of a batch's tokens that must be saved for plans with shared prefixes to be tried. Not measured."""


def faster(problem: Problem, costs: Costs, options: Options, plan: Callable[[Problem], Plan]) -> Plan:
    """Return the faster plan. That of separate sequences is not made where their work takes longer.

    Raises `InfeasibleError` if neither fits, with the smaller cap.
    """
    if options.shares:
        return plan(problem)
    separate = replace(problem, borrowed=())
    if sum(count for _, count in problem.borrowed) < LEAST_SHARE * sum(problem.lengths):
        return plan(separate)
    try:
        shared = plan(problem)
    except InfeasibleError as refusal:
        try:
            return plan(separate)
        except InfeasibleError as other:
            raise min(refusal, other, key=lambda each: each.least_cap_bytes or UNLIMITED_BYTES) from None
    if Chunker.of(separate, costs, options.chunk_tokens).total_us >= shared.predicted.makespan_us:
        return shared
    return min(shared, plan(separate), key=lambda each: each.predicted.makespan_us)


def divisible(problem: Problem, replicas: int) -> Problem:
    """Return the problem with trees that replicas can share: where one takes longer than a replica's part of all without the
    weakest links, sequences that borrow least run whole.
    """
    for least in sorted({count for _, count in problem.borrowed if count}):
        own = [sum(problem.lengths[at] - problem.first_token(at) for at in unit) for unit in problem.indivisible]
        again = sum(count for _, count in problem.borrowed if count == least)
        if len(own) >= replicas and max(own) * replicas <= sum(own) + again:
            break
        borrowed = tuple(each if each.tokens > least else NOTHING_BORROWED for each in problem.borrowed)
        problem = replace(problem, borrowed=borrowed if any(count for _, count in borrowed) else ())
    return problem
