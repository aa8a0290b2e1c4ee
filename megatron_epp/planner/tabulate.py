"""Tabulation of costs: times and sizes of one chunk table, for all planners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import sub

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
from megatron_epp.cost.work import IntColumn, TimeColumn
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Op
from megatron_epp.plan.operations import OperationRows, Track, operations
from megatron_epp.planner.frontier import ABSENT, FrontierStep, recompute_frontier
from megatron_epp.planner.messages import message_room
from megatron_epp.planner.problem import FULL_ONLY, Problem
from megatron_epp.planner.tables import FrontierRows, Sizes, Tables, Times

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
    """Evaluate the costs of every stage and chunk. Stages with equal costs share their rows, which must not be changed.

    A sliced sequence's keys and values are allocated by the forward of its first slice, their gradient by the backward of its
    last; both are freed when the backward of the first slice ends. Without backward, the forward of the last slice frees
    the keys and values, and of everything else a forward holds only what it needs while it runs.

    Args:
        chunks, problem, costs: the table, the batch and the costs to plan with.
        modes: of recompute, to choose from.
        in_order: see `recompute_frontier`.
        work: of the chunks; None for the one that follows from the problem.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple, problem.trained) if work is None else work
    stages, equal_stages, trains = range(problem.num_stages), costs.equal_stages, not problem.forward_only
    distinct = sorted(set(equal_stages))
    found = {stage: {name: row.tolist() for name, row in _sizes(stage, work, problem, costs).items()} for stage in distinct}
    sizes: dict[str, Sizes] = {name: [found[stage][name] for stage in equal_stages] for name in found[0]}

    def times(column: Callable[[int], TimeColumn]) -> Times:
        rows = {stage: column(stage).tolist() for stage in distinct}
        return [rows[stage] for stage in equal_stages]

    added = _added(problem, costs, work)
    message_us, message_bytes = costs.message_us(work).tolist(), costs.message_bytes(work).tolist()
    shards = shard_room(added.get(Op.S), len(message_bytes)) or (0,) * problem.num_ranks
    room = message_room(problem, message_bytes)
    placement = problem.placement
    stages_of = tuple(tuple(s for s in stages if placement[s] == rank) for rank in range(max(placement) + 1))
    return Tables(
        num_layers=costs.num_layers,
        forward_us=times(lambda stage: costs.forward_us(stage, work)),
        backward_us=times(lambda stage: costs.backward_us(stage, work)) if trains else [],
        weight_us=times(lambda stage: costs.weight_us(stage, work)) if trains else [],
        spared_us=times(lambda stage: costs.spared_us(stage, work)) if trains else [],
        exchange_us=times(lambda stage: costs.exchange_us(stage, work)),
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
        frontier=_frontiers(
            {
                stage: recompute_frontier(stage, work, costs, modes, in_order) if trains else _empty_frontier(len(chunks))
                for stage in distinct
            },
            equal_stages,
        ),
        **sizes,
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
        num_chunks: of the chunk table.
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
        work: of the chunks.
        costs: time and memory of every stage.
    """
    items: Counter[str] = Counter()
    for stage in stages:
        items.update(costs.static_items(stage))
    passes = [{name: int(row.max(initial=0)) for name, row in costs.pass_items(stage, work).items()} for stage in stages]
    return dict(items) | max(passes, key=lambda one: sum(one.values()))


def _frontiers(found: dict[int, list[FrontierStep]], equal_stages: Sequence[int]) -> tuple[FrontierRows, ...]:
    """Combine the recompute frontiers of all stages, shorter ones padded with `ABSENT` steps."""
    longest = max(map(len, found.values()))
    rows = {}
    for stage, frontier in found.items():
        filled = [*frontier, *_empty_frontier(len(frontier[0].mode)) * (longest - len(frontier))]
        rows[stage] = [
            (
                frontier_step.mode.tolist(),
                frontier_step.saved.tolist(),
                frontier_step.layer_us.tolist(),
                frontier_step.fuller.tolist(),
            )
            for frontier_step in filled
        ]
    return tuple(
        FrontierRows(*map(list, zip(*(rows[stage][at] for stage in equal_stages), strict=True))) for at in range(longest)
    )


def _empty_frontier(num_chunks: int) -> list[FrontierStep]:
    none = np.zeros(num_chunks, dtype=np.int64)
    return [FrontierStep(none + ABSENT, none, np.zeros(num_chunks), none)]


def _host_us_per_byte(costs: Costs) -> float:
    one_us = costs.host_us(1e9)
    return (costs.host_us(2e9) - one_us) / 1e9 if one_us < np.inf else np.inf


def _sizes(stage: int, work: ChunkWork, problem: Problem, costs: Costs) -> dict[str, IntColumn]:
    none = np.zeros(len(work.tokens), dtype=np.int64)
    cache, gradient = costs.cache_bytes(stage, work), costs.gradient_bytes(stage, work)
    opened, closed = np.where(work.first, cache, 0), np.where(work.last, cache, 0)
    if problem.forward_only:
        passing = costs.transient_bytes(stage, work)
        kept = weight = of_layer = head = release_per_layer = layer_peak = split = constant = half_peak = first_mlp = (
            residual
        ) = none
        forward_alloc, forward_free = opened + passing, closed + passing
    else:
        kept = costs.activation_bytes(stage, work, NO_RECOMPUTE)
        comes = np.where(work.last, gradient, 0)
        layer, head = costs.layer_bytes(stage, work), costs.head_bytes(stage, work) + costs.half_freed_bytes(stage, work)
        goes = np.where(work.first, cache + gradient, 0)
        cached = max(1, costs.num_cached_layers[stage])
        release_per_layer = layer + (goes - comes) // cached
        head = head + goes // cached * costs.num_cached_halves(stage)
        layer_peak, split = (costs.layer_peak_bytes(stage, work, split=split).num_bytes - layer for split in (False, True))
        weight, of_layer = costs.weight_bytes(stage, work), costs.layer_weight_bytes(stage, work)
        constant = sum(costs.half_layer_items(stage, work).values(), none)
        half_peak, first_mlp = costs.half_peak_bytes(stage, work), costs.first_mlp_bytes(stage, work)
        forward_alloc, forward_free = opened, none
        residual = comes - goes
    return {
        "activation": kept,
        "layer_input": costs.layer_bytes(stage, work, "full"),
        "forward_alloc": forward_alloc,
        "forward_free": forward_free,
        "backward_head": head,
        "backward_release_per_layer": release_per_layer,
        "backward_layer_peak": layer_peak,
        "backward_constant": constant,
        "backward_half_peak": half_peak,
        "first_mlp": first_mlp,
        "backward_residual": residual,
        "passing": sum(costs.pass_items(stage, work).values(), none),
        "weight_bytes": weight,
        "weight_layer": of_layer,
        "split_layer_peak": split,
    }
