"""FlexSP (arXiv 2412.01523, section 4): short sequences on few context-parallel ranks, long ones on many, at the same time.

Sequences are sorted by length and divided into consecutive microbatches of about equally many tokens. Sequences of a microbatch
are assigned to groups of 1, 2, 4, ... of the context-parallel ranks so that the slowest group ends as early as possible, and no
rank gets more than its share of memory. Several numbers of microbatches are tried.

Kept: all of this. Changed: the best of all ways to divide the ranks into groups, each with longest-first assignment, stands in
place of length buckets and an integer program; microbatches run through a pipeline, by 1F1B, with the recompute that the cap
requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

from megatron_epp.contrib.flexsp.context_groups import ContextGroups, Group
from megatron_epp.contrib.flexsp.group_costs import GroupCosts, GroupedDecisions
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import LinearTime, causal_pairs
from megatron_epp.plan import Chunk, PlanError, Remedy, Segment
from megatron_epp.plan.first_fit import longest_first
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.baselines.contest import Contest
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import fit_recompute
from megatron_epp.planner.order import slice_groups

MICROBATCHES_PER_RANK = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of microbatches that are tried, as multiples of the pipeline's ranks."""
FULLEST = (1.25, 2.0, 4.0)
"""Most tokens of a rank that are tried, as multiples of the mean in a microbatch."""


def flexsp(problem: Problem, costs: Costs, options: Options, smallest: int = 1) -> Decisions:
    """Plan microbatches whose sequences have context-parallel degrees of their own.

    A group has at least `smallest` ranks; with all of them, every sequence has the same degree.

    Raises:
        InfeasibleError: nothing that was tried fits the caps.
        PlanError: the costs do not know groups of context-parallel ranks, or the placement is not one stage per rank.
    """
    if not costs.context_exchange_us:
        raise PlanError(
            f"planner {options.planner!r} needs costs by formula of 2, 4, 8, ... context-parallel ranks, to know "
            "what exchanges of their groups take",
            Remedy("set", "context_parallel", "one of these"),
        )
    contest, grouped = Contest(problem, costs, options), GroupCosts(costs)
    degrees = [1 << power for power in range(len(costs.context_exchange_us)) if 1 << power >= smallest]
    slowest = max(range(problem.num_stages), key=costs.num_layers.__getitem__)
    lines = {degree: grouped.line(slowest, degree) for degree in degrees}
    for fullest in FULLEST:
        for microbatches in dict.fromkeys(_microbatches(problem)):
            divided = [divide_ranks(sequences, problem.lengths, lines, fullest) for sequences in microbatches]
            _enter(contest, divided, grouped.num_ranks)
    return contest.result()


class Divided(NamedTuple):
    """Groups of a microbatch: degrees, and the sequences of each."""

    degrees: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]

    def chunk(self, lengths: Sequence[int]) -> tuple[Chunk, tuple[Group, ...]]:
        """Return a chunk of the sequences in the order of their groups, and the groups that have any."""
        firsts, begins = accumulate(self.degrees, initial=0), accumulate(map(len, self.held), initial=0)
        rows = zip(firsts, self.degrees, self.held, begins, strict=False)
        groups = (Group(first, degree, (*range(at, at + len(own)),)) for first, degree, own, at in rows if own)
        return Chunk(tuple(Segment(q, 0, lengths[q]) for own in self.held for q in own)), tuple(groups)


def _enter(contest: Contest, divided: Sequence[Divided], num_ranks: int) -> None:
    """Judge microbatches with as much recompute as the caps require.

    Args:
        divided: the groups of every microbatch.
    """
    problem = contest.problem
    chunks, of_chunk = zip(*(own.chunk(problem.lengths) for own in divided), strict=True)
    fullest = [max(group.rank_tokens(chunk) for group in own) for own, chunk in zip(of_chunk, chunks, strict=True)]
    groups = ContextGroups(num_ranks, of_chunk, tuple(fullest))
    order = seq1f1b_order(slice_groups(chunks), problem.num_stages, problem.forward_only)
    decisions = GroupedDecisions(chunks, order, [[0] * len(chunks)] * problem.num_stages, extensions=(groups,))
    tables = decisions.tables(problem, contest.costs)
    fit = fit_recompute(order, tables, problem.cap_bytes, contest.options)
    if fit.recompute_steps is None:
        contest.would_do(fit.needed_bytes)
    else:
        contest.enter(replace(decisions, recompute_steps=fit.recompute_steps), tables)


def _microbatches(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield ways to divide the sequences, longest first, into consecutive microbatches of about equally many tokens."""
    falling, total = longest_first(problem.lengths), sum(problem.lengths)
    for share in MICROBATCHES_PER_RANK:
        count = min(share * problem.num_ranks, len(falling))
        before = accumulate((problem.lengths[q] for q in falling), initial=0)
        parts = [
            min(count - 1, (done + problem.lengths[q] // 2) * count // total) for q, done in zip(falling, before, strict=False)
        ]
        yield tuple(tuple(q for q, _ in own) for _, own in groupby(zip(falling, parts, strict=True), key=lambda part: part[1]))


def divide_ranks(sequences: Sequence[int], lengths: Sequence[int], lines: dict[int, LinearTime], fullest: float) -> Divided:
    """Assign the sequences of a microbatch to groups; the slowest group of the result ends first.

    Args:
        sequences: longest first.
        lengths: tokens of every sequence.
        lines: time of a group in its tokens and pairs, by its degree.
        fullest: most tokens of a rank, as a multiple of the mean; all ranks together may always share everything.
    """
    ranks = max(lines)
    most = fullest * sum(lengths[q] for q in sequences) / ranks
    divided = [(_time_us(sequences, lengths, lines[ranks]), Divided((ranks,), (tuple(sequences),)))]
    for degrees in _partitions(ranks, ranks // 2, min(lines)):
        if (held := _assign(sequences, lengths, degrees, lines, most)) is not None:
            slowest_us = max(_time_us(own, lengths, lines[degree]) for degree, own in zip(degrees, held, strict=True))
            divided.append((slowest_us, Divided(degrees, held)))
    return min(divided, key=lambda timed: timed[0])[1]


def _assign(
    sequences: Sequence[int], lengths: Sequence[int], degrees: Sequence[int], lines: dict[int, LinearTime], most: float
) -> tuple[tuple[int, ...], ...] | None:
    """Put each sequence into the group that then ends first; None if one fits no group."""
    held: list[list[int]] = [[] for _ in degrees]
    tokens, times_us = [0] * len(degrees), [0.0] * len(degrees)
    for q in sequences:
        own, pairs = lengths[q], causal_pairs(0, lengths[q])
        best, best_us = -1, 0.0
        for at, degree in enumerate(degrees):
            line = lines[degree]
            after_us = times_us[at] + line.per_token_us * own + line.per_pair_us * pairs
            if tokens[at] + own <= most * degree and (best < 0 or after_us < best_us):
                best, best_us = at, after_us
        if best < 0:
            return None
        held[best].append(q)
        tokens[best] += own
        times_us[best] = best_us
    return tuple(map(tuple, held))


def _time_us(sequences: Sequence[int], lengths: Sequence[int], line: LinearTime) -> float:
    """Time of a group with these sequences."""
    return line.time_us(sum(lengths[q] for q in sequences), sum(causal_pairs(0, lengths[q]) for q in sequences))


def _partitions(ranks: int, largest: int, smallest: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to divide ranks into groups, larger ones first."""
    if not ranks:
        yield ()
    while largest >= smallest:
        if largest <= ranks:
            yield from ((largest, *rest) for rest in _partitions(ranks - largest, largest, smallest))
        largest //= 2
