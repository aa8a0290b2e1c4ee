"""Times and sizes of chunks whose sequences are divided over groups of context-parallel ranks (`context_groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.contrib.flexsp.context_groups import ContextGroups, groups_of
from megatron_epp.cost.model import Costs, PipelineCosts
from megatron_epp.cost.work import ChunkWork, IntColumn, LinearTime, TimeColumn, causal_pairs
from megatron_epp.plan import Chunk
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.tables import Tables, tabulate


class GroupCosts:
    """Costs of groups, from the costs of all context-parallel ranks together.

    A group of ``d`` of ``n`` ranks takes as long, and holds as much on each rank, as all ranks with ``n / d`` times the tokens
    and pairs, but for the exchange of its layers. All tokens pass the output layer, whether they are trained or not.

    Args:
        costs: of the pipeline whose chunks all ranks share.

    Raises:
        ValueError: the costs do not know the exchanges of groups.
    """

    def __init__(self, costs: PipelineCosts) -> None:
        if not costs.context_exchange_us:
            raise ValueError(f"the costs {costs.name!r} do not know the exchanges of groups")
        self.costs, self.num_ranks = costs, 1 << (len(costs.context_exchange_us) - 1)

    def line(self, stage: int, degree: int) -> LinearTime:
        """Return the time of a forward and a backward of a group on a stage, in the tokens and pairs of its sequences."""
        scale = self.num_ranks // degree
        whole = self.costs.line(stage, "forward") + self.costs.line(stage, "backward")
        more_us = 2 * self._more_us(stage, np.array([degree])).item()
        return LinearTime(whole.fixed_us, whole.per_token_us * scale + more_us, whole.per_pair_us * scale, whole.launch_us)

    def pass_us(self, stage: int, groups: ContextGroups, chunks: Sequence[Chunk]) -> tuple[TimeColumn, TimeColumn]:
        """Return the times of the slowest groups of all chunks, forward and backward, in microseconds."""
        tokens, pairs, degrees, first = _columns(groups, chunks)
        scale, more_us = self.num_ranks // degrees, self._more_us(stage, degrees) * tokens
        work = _whole(tokens * scale, pairs * scale)
        forward_us, backward_us = self.costs.forward_us(stage, work), self.costs.backward_us(stage, work)
        return np.maximum.reduceat(forward_us + more_us, first), np.maximum.reduceat(backward_us + more_us, first)

    def work(self, groups: ContextGroups, chunks: Sequence[Chunk]) -> ChunkWork:
        """Return the work of chunks with as many tokens and pairs on every rank as on the ranks that have most of either."""
        _, pairs, degrees, first = _columns(groups, chunks)
        tokens = np.array(groups.rank_tokens, dtype=np.int64) * self.num_ranks
        return _whole(tokens, np.maximum.reduceat(pairs * (self.num_ranks // degrees), first))

    def _more_us(self, stage: int, degrees: IntColumn) -> TimeColumn:
        """Time per token and pass by which exchanges of groups exceed exchanges of all ranks with as many tokens each."""
        exchanges = np.array(self.costs.context_exchange_us)
        each_us = exchanges[np.log2(degrees).astype(np.int64)] - exchanges[-1] * (self.num_ranks // degrees)
        more_us: TimeColumn = self.costs.stages[stage].num_cached_layers * each_us
        return more_us


@dataclass(frozen=True, slots=True)
class GroupedDecisions(Decisions):
    """Decisions whose chunks are divided over groups of context-parallel ranks, by the `ContextGroups` in `extensions`."""

    def tables(self, problem: Problem, costs: Costs) -> Tables:
        """Return times of the slowest group of each chunk, and bytes of its fullest rank.

        Recompute takes as long as if every rank had as much as the one with most.
        """
        groups = groups_of(self.extensions)
        assert groups is not None
        grouped = GroupCosts(costs)
        tables = tabulate(self.chunks, problem, costs, self.modes, work=grouped.work(groups, self.chunks))
        passes = dict(zip(costs.equal_stages, tables.passes, strict=True))
        for stage, own in passes.items():
            forward_us, backward_us = grouped.pass_us(stage, groups, self.chunks)
            passes[stage] = replace(own, forward_us=forward_us, backward_us=backward_us)
        return replace(tables, passes=tuple(passes[stage] for stage in costs.equal_stages))


def _columns(groups: ContextGroups, chunks: Sequence[Chunk]) -> tuple[IntColumn, IntColumn, IntColumn, IntColumn]:
    """Return tokens, pairs and degree of every group, and where the groups of each chunk begin."""
    rows = [
        (group.tokens(chunk), sum(causal_pairs(*chunk.segments[at][1:]) for at in group.segments), group.degree)
        for chunk, own in zip(chunks, groups.of_chunk, strict=True)
        for group in own
    ]
    tokens, pairs, degrees = np.array(rows, dtype=np.int64).T
    counts = [len(own) for own in groups.of_chunk]
    return tokens, pairs, degrees, np.cumsum([0, *counts[:-1]])


def _whole(tokens: IntColumn, pairs: IntColumn) -> ChunkWork:
    none = np.zeros(len(tokens), dtype=np.int64)
    false = none.astype(np.bool_)
    return ChunkWork(
        tokens=tokens,
        pairs=pairs,
        sliced=false,
        first=false,
        last=false,
        prefix_tokens=none,
        cache_tokens=none,
        num_slices=none,
    )
