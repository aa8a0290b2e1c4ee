"""Choice of what is shared: between a plan with shared prefixes and one of separate sequences, and among replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megatron_epp.cost.model import Costs
from megatron_epp.features.trees.tree_cuts import depth_first
from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Plan
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.plan.problem import Options, Problem, Share
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.service.replica_balance import longest_first

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
    """Return the problem with trees that replicas can share: the largest are split where the replica with most
    tokens has fewer then, and each piece holds what all sequences of its tree begin with.
    """
    trees = [_Tree.of(problem, unit) for unit in problem.indivisible if problem.borrowed]
    pieces, chosen, most = [1] * len(trees), list[int](), math.inf
    while trees:
        tokens = [tree.tokens(count) for tree, count in zip(trees, pieces, strict=True) for _ in range(count)]
        if len(tokens) >= replicas:
            load = max(sum(tokens[at] for at in share) for share in longest_first(tokens, replicas))
            chosen, most = ([*pieces], load) if load < most else (chosen, most)
        larger = [at for at, tree in enumerate(trees) if pieces[at] < len(tree.parts)]
        if not larger or most * replicas <= sum(tokens):
            break
        pieces[max(larger, key=lambda at: trees[at].tokens(pieces[at]))] += 1
    pieces = chosen or pieces
    if max(pieces, default=1) == 1:
        return problem
    borrowed = [*problem.borrowed]
    for tree, count in zip(trees, pieces, strict=True):
        for share in longest_first(tree.part_tokens, count) if count > 1 else ():
            _share_within({q for part in share for q in tree.parts[part]}, problem, borrowed)
    return divisible(replace(problem, borrowed=tuple(borrowed) if any(tokens for _, tokens in borrowed) else ()), replicas)


def _share_within(piece: set[int], problem: Problem, borrowed: list[Borrowed]) -> None:
    """Have the sequences of a piece of a tree borrow of each other alone, as many tokens as before where they can."""
    before, common = -1, 0
    for q in depth_first(range(len(problem.lengths)), problem.borrowed):
        common = min(common, problem.first_token(q))  # with the one before it a sequence shares what it borrows
        if q in piece:
            borrowed[q] = Borrowed(path_of(before, common, borrowed)[-1].sequence, common) if common else NOTHING_BORROWED
            before, common = q, problem.lengths[q]


class _Tree(NamedTuple):
    """Sequences that no other replica may have a part of, and the parts that are left of them where those that borrow up to
    `least` tokens run whole; `part_tokens` are what a part holds behind these.
    """

    least: int
    parts: tuple[Share, ...]
    part_tokens: list[int]

    @classmethod
    def of(cls, problem: Problem, unit: Share) -> _Tree:
        own = problem.part(unit)
        parts, loose, least = own.indivisible, own.borrowed, 0
        for least in sorted({tokens for _, tokens in own.borrowed if tokens}):
            loose = tuple(each if each.tokens > least else NOTHING_BORROWED for each in own.borrowed)
            if len(parts := replace(own, borrowed=loose).indivisible) > 1:
                break
        part_tokens = [sum(max(0, own.lengths[at] - max(least, loose[at].tokens)) for at in part) for part in parts]
        return cls(least, tuple(tuple(unit[at] for at in part) for part in parts), part_tokens)

    def tokens(self, pieces: int) -> float:
        return self.least + sum(self.part_tokens) / pieces
