"""InfiniPipe's planner (arXiv 2509.21275, sections III-B and III-D, Algorithm 1, Equations 7 to 20).

Kept: the longest sequence is cut into K slices of equal time, others at the same tokens, and short ones are packed into tail
slices and buckets (Algorithm 1). 1F1B over slices has the longest sequences first and the window of Equation 7. Sequences are
divided into pipelines, which run one after the other, by dynamic programming (Equations 12 to 14). Recomputed layers are
constant along diagonals, and an integer program finds the fewest that fit (Equations 15 to 20). An outer loop chooses K.

Changed: where the paper leaves a detail open or its expression is lost, the K tried are `SLICES`, and both readings of the
token threshold are tried (`algorithm_1`). Candidates are compared by simulation, with the least makespan and not the least
estimate. All of these favour the baseline. The search ends with its best after `MOST_ENTRIES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_epp.contrib.papers.infinipipe.checkpointing import Effort, diagonal_checkpoints
from megatron_epp.contrib.papers.slices import Slicer, slice_boundaries
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk
from megatron_epp.plan.first_fit import joined, longest_first
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.baselines.contest import Contest, own_recompute_only
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.order import Order, slice_groups
from megatron_epp.planner.tables import Tables

SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Values of K that the outer loop tries."""
PATIENCE = 3
"""Values of K in a row that may be no better before the outer loop ends."""
MOST_ENTRIES = 20_000_000
"""Effort on integer programs after which no other is begun where there is a plan: about a minute of one core."""


def infinipipe(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Search over K: for each, chunk the batch, group sequences into pipelines and choose recompute; the least makespan wins.

    `MOST_ENTRIES` is reached with some hundred chunks under a tight cap. With `options.slices` that is K, and
    `options.chunk_tokens` is the token capacity.

    Args:
        problem, costs, options: as `planner.plan` takes them.

    Raises:
        InfeasibleError: nothing fits the cap for any K.
        PlanError: recompute is fixed, or the placement is not one stage per rank in order.
    """
    own_recompute_only(options)
    contest = Contest(problem, costs, options)
    slicer = Slicer.of(problem, costs, options.chunk_tokens)
    seen: set[tuple[Chunk, ...]] = set()
    worse, effort = 0, Effort()
    for slices in SLICES if options.slices is None else (options.slices,):
        before, new = contest.best_us, False
        for more_tokens in (False, True):
            if contest.best is not None and effort.num_entries >= MOST_ENTRIES:
                return contest.result()
            chunks = algorithm_1(slicer, slicer.grain(slices=slices).slices, more_tokens=more_tokens)
            if chunks not in seen and (len(chunks) <= MOST_CHUNKS or not seen):
                new = True
                seen.add(chunks)
                _enter(contest, chunks, effort)
        worse = 0 if contest.best_us < before or contest.best is None else worse + new
        if worse == PATIENCE:
            break
    return contest.result()


def algorithm_1(slicer: Slicer, slices: int, *, more_tokens: bool = False) -> tuple[Chunk, ...]:
    """Cut the longest sequence into slices of equal time, all others at the same places, and pack the short ones.

    Longest in time first, a short sequence goes to the bucket with the smallest time per token that has room for it under the
    time and the token threshold. A bucket of its own is opened when the emptiest has no token room; the time threshold is
    loosened when only time stands in the way. For that the paper takes the least time of all buckets, which may be of one
    without token room (then nothing changes, for ever); this takes the least time of the buckets that have room.

    Args:
        slices: of the longest sequence, the paper's K.
        more_tokens: the paper's expression for the token threshold did not survive. False takes the tokens of the first, which
            is the longest, slice; True takes as many as short sequences need to fill the time threshold.

    Returns:
        Chunks in forward order: long sequences first, the longest first, then batched chunks.
    """
    lengths, ends = slicer.problem.lengths, slicer.slice_ends(slices)
    falling = longest_first(lengths)
    long = [q for q in falling if lengths[q] > ends[0]]
    short = [q for q in falling if lengths[q] <= ends[0]]
    boundaries = slice_boundaries(ends, long, lengths)
    time_limit_us = max(slicer.slice_us(start, end) for start, end in pairwise([0, *ends]))
    token_limit = max(end - start for start, end in pairwise([0, *ends]))
    short_us = sum(slicer.sequence_us(lengths[q]) for q in short)
    if more_tokens and short_us > 0:
        fill = round(time_limit_us * sum(lengths[q] for q in short) / short_us)
        token_limit = min(slicer.token_cap, max(token_limit, fill))
    tails = [(boundaries[q][-2], lengths[q]) for q in long]
    return joined(boundaries, _buckets(slicer, tails, short, time_limit_us, token_limit), lengths)


def _buckets(
    slicer: Slicer, tails: Sequence[tuple[int, int]], short: Sequence[int], time_limit_us: float, token_limit: int
) -> list[list[int]]:
    """Pack the short sequences as `algorithm_1` says.

    Args:
        tails: start and end of the tail slices, each of which is in a bucket at the start.
        short: the short sequences, in the order in which they are packed.
        time_limit_us: of a bucket, loosened if need be.

    Returns:
        The short sequences of every bucket, the tails' buckets first.
    """
    held: list[list[int]] = [[] for _ in tails]
    times_us, sizes = np.zeros(len(tails) + len(short)), np.zeros(len(tails) + len(short), dtype=np.int64)
    times_us[: len(tails)] = [slicer.slice_us(start, end) for start, end in tails]
    sizes[: len(tails)] = [end - start for start, end in tails]
    for q in short:
        tokens = slicer.problem.lengths[q]
        time_us, open_us, taken = slicer.sequence_us(tokens), times_us[: len(held)], sizes[: len(held)]
        room = taken + tokens <= token_limit
        if room.any():
            time_limit_us = max(time_limit_us, float(open_us[room].min()) + time_us)
            fits = room & (open_us + time_us <= time_limit_us)
            number = int(np.where(fits, open_us / taken, np.inf).argmin())
        else:
            number = len(held)
            held.append([])
        times_us[number] += time_us
        sizes[number] += tokens
        held[number].append(q)
    return held


def _enter(contest: Contest, chunks: tuple[Chunk, ...], effort: Effort) -> None:
    problem, tables = contest.problem, contest.tables(chunks)
    if lower_bound_us(tables, chunks, problem, contest.options) >= contest.best_us:
        return
    if problem.forward_only:
        order = seq1f1b_order(slice_groups(chunks), problem.num_stages, forward_only=True)
        contest.enter(Decisions(chunks, order, [[0] * len(chunks) for _ in tables.num_layers]), tables)
        return
    pipelines = Grouping(contest, tables, slice_groups(chunks), effort).pipelines()
    if pipelines is None:
        return
    order = tuple(tuple(action for own in pipelines for action in own.order[rank]) for rank in range(problem.num_stages))
    recompute_steps = [
        [sum(counts) for counts in zip(*rows, strict=True)]
        for rows in zip(*(pipeline.recompute_steps for pipeline in pipelines), strict=True)
    ]
    contest.enter(Decisions(chunks, order, recompute_steps), tables)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A complete 1F1B over some of the sequences."""

    order: Order  # of every rank
    recompute_steps: RecomputeSteps  # recomputed, ``[stage][chunk]`` of the whole table; zero for the chunks of other pipelines
    cost_us: float  # start-up and recompute, as the paper estimates them (Equation 13)


class Grouping:
    """Partition of the sequences into pipelines by dynamic programming (Equations 12 to 14)."""

    def __init__(self, contest: Contest, tables: Tables, groups: Sequence[Sequence[int]], effort: Effort) -> None:
        """Estimate a pipeline's start-up as ``(stages - 1)`` average chunks, forward and backward; a layer is the average one.

        Args:
            contest: the problem, and the record of caps that would suffice.
            groups: the chunks of every sequence; batched chunks stand alone.
            effort: on integer programs, updated.
        """
        self.contest, self.tables, self.groups, self.effort = contest, tables, groups, effort
        cells = len(tables.num_layers) * tables.num_chunks
        pass_us = sum(sum(own.forward_us.tolist()) for own in tables.passes)
        pass_us += sum(sum(own.backward_us.tolist()) for own in tables.passes)
        self.startup_us = (len(tables.num_layers) - 1) * pass_us / cells
        self.layer_us = sum(float(passes.frontier.layer_us[0].sum()) for passes in tables.passes) / cells

    def pipelines(self) -> list[Pipeline] | None:
        """The cheapest partition into runs of like numbers of chunks, longest first; None where no partition fits."""
        counts = sorted({len(group) for group in self.groups})
        alone = [self._pipeline([count]) for count in counts]
        if None in alone:
            self._note_cap(counts)
            return None
        best: list[tuple[float, list[Pipeline]]] = [(0.0, [])]
        for upto in range(1, len(counts) + 1):
            cheapest: tuple[float, list[Pipeline]] = (math.inf, [])
            for start in reversed(range(upto)):
                if start < upto - 1 and self.effort.num_entries >= MOST_ENTRIES:
                    break
                before_us, before = best[start]
                pipeline = alone[start] if start == upto - 1 else self._pipeline(counts[start:upto], cheapest[0] - before_us)
                if pipeline is not None and before_us + pipeline.cost_us < cheapest[0]:
                    cheapest = before_us + pipeline.cost_us, [pipeline, *before]
            best.append(cheapest)
        return best[-1][1]

    def _pipeline(self, counts: Sequence[int], limit_us: float = math.inf) -> Pipeline | None:
        """Build one pipeline; None if nothing fits the caps, or nothing below the limit on its cost."""
        if limit_us <= self.startup_us:
            return None
        order = self._order(counts)
        limit = (limit_us - self.startup_us) / self.layer_us if self.layer_us > 0 else math.inf
        checkpoints = diagonal_checkpoints(order, self.tables, self.contest.problem.cap_bytes, limit, self.effort)
        if checkpoints is None:
            return None
        return Pipeline(order, checkpoints[1], self.startup_us + self.layer_us * checkpoints[0])

    def _order(self, counts: Sequence[int]) -> Order:
        chosen = (group for group in self.groups if len(group) in counts)
        return seq1f1b_order(sorted(chosen, key=len, reverse=True), len(self.tables.num_layers))

    def _note_cap(self, counts: Sequence[int]) -> None:
        """Record a cap that suffices if each number of chunks runs as its own pipeline, all layers recomputed or none."""
        tables, least = self.tables, []
        for order in (self._order([count]) for count in counts):
            rows = ([[layers] * tables.num_chunks] * len(order) for layers in (0, min(tables.num_layers)))
            least.append(min(max(peaks_bytes(order, tables, row)) for row in rows))
        self.contest.would_do(max(least))
