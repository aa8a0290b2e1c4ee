"""Vocabulary shards: their operations inserted into an order of forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import add

import numpy as np

from megatron_epp.plan import Op, PlanError
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.kernels import shards, timing
from megatron_epp.planner.kernels.codes import FORWARD, KIND_BITS, KIND_MASK, KINDS, CodedOrder, Codes, encode
from megatron_epp.planner.kernels.compiled import float_zeros, floats, integer_zeros, integers
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.tables import Tables

SHARD_KINDS = (*KINDS, Op.S, Op.N, Op.T)


def has_shards(tables: Tables) -> bool:
    """True if the costs have the output layer in shards over the ranks, which then need operations of their own."""
    return Op.S in tables.added


def completed_with_shards(order: Order, tables: Tables, recompute_steps: RecomputeSteps) -> Order:
    """Insert the operations of vocabulary shards if there are any and the order has none.

    Args:
        order, tables, recompute_steps: as for `with_shards`.
    """
    if not has_shards(tables) or any(action.op is Op.S for row in order for action in row):
        return order
    return with_shards(order, tables, recompute_steps)


def with_shards(order: Order, tables: Tables, recompute_steps: RecomputeSteps) -> Order:
    """Insert the operations of vocabulary shards (`plan.vocabulary`) into an order that has none.

    Every rank runs the shards of chunks in the order of the last stage's forwards, each as soon as its input has come and an
    action ends. A weight gradient waits, first come first served, for a gap that it fits into, or until the memory set aside
    for shards (`Tables.shard_room`) is needed. The order of forwards and backwards stays.

    Args:
        order: forwards and, unless it is forward-only, backwards, with or without weight gradients of their own.
        tables: times and sizes of the chunks.
        recompute_steps: recompute ``[stage][chunk]``, which makes backwards longer.

    Raises:
        PlanError: the order deadlocks.
    """
    chunks, ranks, stages = len(tables.message_us), len(tables.stages_of), len(tables.rank_of)
    codes, columns = encode(order, chunks, SHARD_KINDS), tables.columns_with(SHARD_KINDS)
    split, took_us = integer_zeros(columns.num_items), floats(columns.action_us)
    if tables.backward_us:
        timing.mark_split(codes.actions, split)
        timing.durations(columns, integers(chain.from_iterable(recompute_steps)), split, took_us)
    last_rank = tables.rank_of[-1]
    own = np.asarray(codes.actions[codes.starts[last_rank] : codes.starts[last_rank + 1]], dtype=np.int64)
    forwards = own[own & KIND_MASK == FORWARD] >> KIND_BITS
    line = (forwards[forwards // chunks == stages - 1] % chunks).tolist()
    more = [(2 if tables.backward_us else 1) * chunks + (chunks if rank == last_rank else 0) for rank in range(ranks)]
    first = [0, *accumulate(map(add, np.diff(codes.starts).tolist(), more))]
    run = _run(tables, line, bool(tables.backward_us), first, len(columns.need_starts) - 1)
    run = run._replace(at=integers(codes.starts[:-1]))
    if not shards.insert(codes.actions, codes.starts, columns, took_us, run):
        raise PlanError("the order deadlocks before the operations of vocabulary shards are inserted")
    return CodedOrder(Codes(run.out, integers(first), SHARD_KINDS), chunks)


def _run(tables: Tables, line: Sequence[int], backward: bool, first: Sequence[int], num_nodes: int) -> shards.Shards:
    """Collect times and bytes of the shards, and storage.

    Args:
        tables: times and sizes of the chunks.
        line: chunks in the order of the last stage's forwards.
        backward: the order is not forward-only.
        first: where each rank's actions begin in the result, and its length.
        num_nodes: nodes of the columns.
    """
    rows, chunks, ranks = tables.added[Op.S], len(line), len(first) - 1
    position = [0] * chunks
    for at, c in enumerate(line):
        position[c] = at
    kept = [
        taken - given
        for takes, gives in zip(rows.takes, rows.gives, strict=True)
        for taken, given in zip(takes, gives, strict=True)
    ]

    def zeros(count: int, value: int = 0) -> list[int]:
        return [value] * count

    return shards.Shards(
        line=integers(line),
        position=integers(position),
        spread_us=floats(rows.collective_us[Op.SPREAD]),
        gather_us=floats(rows.collective_us[Op.GATHER]),
        peak_bytes=integers(chain.from_iterable(rows.takes)),
        kept_bytes=integers(kept),
        room_bytes=integers(tables.shard_room),
        last_rank=tables.rank_of[-1],
        backward=int(backward),
        came_us=floats([-1.0] * chunks),
        gathered_us=float_zeros(chunks),
        finished=integers(zeros(chunks)),
        at=integers(zeros(ranks)),
        shards=integers(zeros(ranks)),
        gradients=integers(zeros(ranks)),
        losses=integers(zeros(1)),
        clock_us=float_zeros(ranks),
        held_bytes=integers(zeros(ranks)),
        choice=integers(zeros(ranks)),
        when_us=float_zeros(ranks),
        stale=integers(zeros(ranks, 1)),
        ended_us=floats([-1.0] * num_nodes),
        out=integers(zeros(first[-1])),
        filled=integers(first[:-1]),
    )
