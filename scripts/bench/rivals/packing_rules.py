"""Microbatches by the rules of Megatron's schedulers of packed sequences, as its development branch has them in August 2026."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Rows = list[list[int]]
"""Lengths of the sequences of every microbatch."""
_SLACK = 1.05
"""Most work of a rank in a microbatch, as a multiple of a full rank's whose sequence is the longest of it."""


def dp_balanced(lengths: Sequence[int], budget: int, replicas: int) -> list[Rows] | None:
    """Return the rows of every replica by `dp_balanced`: of at most so many tokens in the order of the data, dealt in turn.

    Where their number is no multiple of the replicas, last sequences of the last rows become rows of their own. None if there
    are fewer sequences than replicas.
    """
    rows: Rows = [[]]
    for length in lengths:
        if rows[-1] and sum(rows[-1]) + length > budget:
            rows.append([])
        rows[-1].append(length)
    at = len(rows) - 1
    while len(rows) % replicas:
        if at < 0:
            return None
        if len(rows[at]) > 1:
            rows.append([rows[at].pop()])
        else:
            at -= 1
    return [rows[replica::replicas] for replica in range(replicas)]


@dataclass(slots=True)
class RankGroup:
    """Ranks that share some sequences of a microbatch, which are positions in the batch."""

    degree: int
    sequences: list[int] = field(default_factory=list)
    tokens: float = 0.0  # of each rank
    work: float = 0.0  # of each rank: squares of lengths


def dynamic_context(lengths: Sequence[int], ranks: int, rank_tokens: int) -> list[list[RankGroup]]:
    """Return the groups of every microbatch by `default_dynamic_cp`, for a power of two of data- and context-parallel ranks.

    The longest sequence that is left opens a microbatch, on the fewest ranks that have room. Each other, in falling order, goes
    to the group, or to free ranks, with which the rank with most work has least. Ranks that are left empty then go to the
    smallest groups, which double.
    """
    left, microbatches = sorted(range(len(lengths)), key=lambda q: (-lengths[q], q)), list[list[RankGroup]]()
    while left:
        groups, later = _microbatch(left, lengths, ranks, rank_tokens)
        microbatches.append(groups)
        left = later
    return microbatches


def _microbatch(
    order: Sequence[int], lengths: Sequence[int], ranks: int, rank_tokens: int
) -> tuple[list[RankGroup], list[int]]:
    def least(q: int) -> int:
        return max(1, 1 << math.ceil(math.log2(lengths[q] / rank_tokens)) if lengths[q] > rank_tokens else 1)

    cap = lengths[order[0]] * rank_tokens * _SLACK
    groups, later = [RankGroup(least(order[0]))], list[int]()
    _put(groups[0], order[0], lengths)
    for q in order[1:]:
        most, free = max(group.work for group in groups), ranks - sum(group.degree for group in groups)
        best: tuple[float, RankGroup] | None = None
        degree = least(q)
        while degree <= ranks:
            added = lengths[q] ** 2 / degree
            fitting = [
                group for group in groups if group.degree == degree and group.tokens + lengths[q] / degree <= rank_tokens
            ]
            for group in [*fitting, *([RankGroup(degree)] if free >= degree else [])]:
                projected = max(most, group.work + added)
                if projected <= cap and (best is None or projected < best[0]):
                    best = projected, group
            degree *= 2
        if best is None:
            later.append(q)
            continue
        if not best[1].sequences:
            groups.append(best[1])
        _put(best[1], q, lengths)
    while (free := ranks - sum(group.degree for group in groups)) > 0:
        smallest = min(groups, key=lambda group: group.degree)
        if smallest.degree > free:
            return _all_ranks(order, lengths, ranks, rank_tokens)
        smallest.degree *= 2
    return groups, later


def _put(group: RankGroup, q: int, lengths: Sequence[int]) -> None:
    group.sequences.append(q)
    group.tokens += lengths[q] / group.degree
    group.work += lengths[q] ** 2 / group.degree


def _all_ranks(order: Sequence[int], lengths: Sequence[int], ranks: int, rank_tokens: int) -> tuple[list[RankGroup], list[int]]:
    """Return a microbatch that all ranks share, of the sequences that fit, and those that do not."""
    group, later = RankGroup(ranks), list[int]()
    for q in order:
        if group.tokens + lengths[q] / ranks <= rank_tokens:
            _put(group, q, lengths)
        else:
            later.append(q)
    return [group], later
