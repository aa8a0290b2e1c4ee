"""Vocabulary shards: their operations inserted into an order of forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import add
from typing import Any, get_type_hints

import numpy as np

from megatron_epp.features.vocabulary import shard_insertion
from megatron_epp.features.vocabulary.shard_tables import shard_peaks
from megatron_epp.plan import Op, PlanError
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.kernels.codes import KINDS, CodedOrder, Codes, encode
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, float_zeros, floats, integer_zeros, integers
from megatron_epp.planner.kernels.timing import STUCK
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables

SHARD_KINDS = (*KINDS, Op.S, Op.N, Op.T)


def with_shards(order: Order, tables: Tables, recompute_steps: RecomputeSteps) -> Order:
    """Insert the operations of vocabulary shards (`plan.vocabulary_operations`) into an order that has none.

    Every rank runs the shards of chunks in the order of the last stage's forwards, each as soon as its input has come and an
    action ends. A weight gradient waits, first come first served, for a gap that it fits into, or until the memory set aside
    for shards (`Tables.added_room`) is needed. Other actions keep their order. Raises `PlanError` if that deadlocks.
    """
    codes, columns = encode(order, tables.num_chunks, SHARD_KINDS), tables.columns_with(SHARD_KINDS)
    run = storage(tables, np.diff(codes.starts).tolist())
    steps, starts = integers(chain.from_iterable(recompute_steps)), codes.starts
    if shard_insertion.insert(codes.actions, starts[:-1], starts[1:], columns, steps, run) == STUCK:
        raise PlanError("the order deadlocks before the operations of vocabulary shards are inserted")
    return CodedOrder(Codes(run.out, run.first, SHARD_KINDS), tables.num_chunks)


def storage(tables: Tables, most: Sequence[int]) -> shard_insertion.Shards:
    """Collect times and bytes of the shards, and storage for the result; ranks have these numbers of other actions."""
    chunks, ranks = tables.num_chunks, len(most)
    columns, backward, last_rank = tables.columns_with(SHARD_KINDS), tables.trains, tables.rank_of[-1]
    more = [(2 if backward else 1) * chunks + (chunks if rank == last_rank else 0) for rank in range(ranks)]
    first = [0, *accumulate(map(add, most, more))]
    return shard_insertion.Shards(
        line=integer_zeros(chunks),
        position=integer_zeros(chunks),
        split=integer_zeros(len(tables.rank_of) * chunks),
        took_us=floats(columns.action_us),
        **tables.once(_fixed_columns),
        last_rank=last_rank,
        backward=int(backward),
        came_us=float_zeros(chunks),
        gathered_us=float_zeros(chunks),
        finished=integer_zeros(chunks),
        at=integer_zeros(ranks),
        shards=integer_zeros(ranks),
        gradients=integer_zeros(ranks),
        losses=integer_zeros(1),
        clock_us=float_zeros(ranks),
        held_bytes=integer_zeros(ranks),
        choice=integer_zeros(ranks),
        when_us=float_zeros(ranks),
        stale=integer_zeros(ranks),
        ended_us=float_zeros(len(columns.need_starts) - 1),
        out=integer_zeros(first[-1]),
        first=integers(first),
        filled=integer_zeros(ranks),
    )


def _fixed_columns(tables: Tables) -> dict[str, Any]:
    """Return what no order changes. With 80 layers on 16 ranks they took 5 ms, as long as it takes to insert the shards."""
    rows, backward = tables.added[Op.S], tables.trains
    kept_bytes = [
        take - give
        for takes, gives in zip(rows.takes, rows.gives, strict=True)
        for take, give in zip(takes, gives, strict=True)
    ]
    return {
        "spread_us": floats(rows.collective_us[Op.SPREAD]),
        "gather_us": floats(rows.collective_us[Op.GATHER]),
        "peak_bytes": integers(chain.from_iterable(shard_peaks(tables.added, backward))),
        "kept_bytes": integers(kept_bytes),
        "room_bytes": integers(tables.added_room),
    }


def no_storage() -> shard_insertion.Shards:
    empty: dict[Any, Any] = {IntegerList: integer_zeros(0), FloatList: float_zeros(0), int: 0}
    return shard_insertion.Shards(**{name: empty[kind] for name, kind in get_type_hints(shard_insertion.Shards).items()})
