"""Tabulation of costs: times and sizes of one chunk table, for all planners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import sub

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
from megatron_epp.plan import Chunk, Op
from megatron_epp.plan.operations import OperationRows, Track, operations
from megatron_epp.planner.messages import message_room
from megatron_epp.planner.passes import passes_of
from megatron_epp.planner.problem import FULL_ONLY, Problem
from megatron_epp.planner.tables import Tables, rows_of

MOST_OPEN = 3
"""Chunks that a rank may have between the `S` and `T` of its vocabulary shard: one runs, one is being reduced, one waits."""


def tabulate(
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    modes: Sequence[str] = FULL_ONLY,
    in_order: bool = False,
    work: ChunkWork | None = None,
) -> Tables:
    """Evaluate the costs of every stage and chunk. Stages with equal costs share passes and rows, which must not be changed.

    Args:
        work: of the chunks; None for the one that follows from the problem.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple, problem.trained) if work is None else work
    equal_stages, trains = costs.equal_stages, not problem.forward_only
    found = {stage: passes_of(stage, work, costs, modes, in_order, problem.forward_only) for stage in set(equal_stages)}
    passes = tuple(found[stage] for stage in equal_stages)
    added = _added(problem, costs, work)
    message_us, message_bytes = costs.message_us(work).tolist(), costs.message_bytes(work).tolist()
    shards = shard_room(added.get(Op.S), len(message_bytes)) or (0,) * problem.num_ranks
    room = message_room(problem, message_bytes)
    placement = problem.placement
    stages_of = tuple(tuple(s for s in range(problem.num_stages) if placement[s] == rank) for rank in range(max(placement) + 1))
    return Tables(
        passes=passes,
        num_layers=costs.num_layers,
        message_us=message_us,
        hops=[message_us if here != there else [0.0] * len(chunks) for here, there in pairwise(placement)],
        static=tuple(
            sum(static_items(own, work, costs).values(), more + shard)
            for own, more, shard in zip(stages_of, room, shards, strict=True)
        ),
        message_bytes=tuple(message_bytes),
        message_room=room,
        shard_room=shards,
        rank_of=placement,
        stages_of=stages_of,
        host_latency_us=costs.host_us(0),
        host_us_per_byte=_host_us_per_byte(costs),
        host_links=tuple(rank // costs.host_turns for rank in range(len(stages_of))),
        offloadable_share=costs.offloadable_share,
        added=added,
        **rows_of(passes, trains),
    )


def _added(problem: Problem, costs: Costs, work: ChunkWork) -> dict[Op, OperationRows]:
    """Tabulate the added operations that the costs know; in a forward-only plan they leave nothing."""
    found = {}
    for kind in operations(Track.COMPUTE):
        rows = None if kind.rows is None else kind.rows(costs, kind.sites(problem.placement), work)
        if rows is not None:
            found[kind.op] = rows._replace(gives=rows.takes) if problem.forward_only else rows
    return found


def shard_room(rows: OperationRows | None, num_chunks: int) -> tuple[int, ...]:
    """Bytes of each rank set aside for chunks between the shards' `S` and `T`: of `MOST_OPEN` of the largest.

    Args:
        rows: of `S`; None if there are no shards.
    """
    if rows is None:
        return ()
    others = min(MOST_OPEN, num_chunks) - 1
    each = zip(rows.takes, rows.gives, strict=True)
    return tuple(max(takes, default=0) + others * max(map(sub, takes, gives), default=0) for takes, gives in each)


def static_items(stages: Sequence[int], work: ChunkWork, costs: Costs) -> dict[str, int]:
    """Compute the bytes by item that a rank holds throughout, with room for its largest pass; passes run one at a time.

    Args:
        stages: of the rank.
    """
    items: Counter[str] = Counter()
    for stage in stages:
        items.update(costs.static_items(stage))
    passes = [{name: int(row.max(initial=0)) for name, row in costs.pass_items(stage, work).items()} for stage in stages]
    return dict(items) | max(passes, key=lambda one: sum(one.values()))


def _host_us_per_byte(costs: Costs) -> float:
    one_us = costs.host_us(1e9)
    return (costs.host_us(2e9) - one_us) / 1e9 if one_us < np.inf else np.inf
