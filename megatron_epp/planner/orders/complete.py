"""Completion of an order of forwards and backwards: the vocabulary's shards, and weight gradients of their own."""

from __future__ import annotations

from operator import itemgetter

from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.memory.offload import Offload, timed
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.split_weight import with_split_weights
from megatron_epp.planner.orders.vocabulary import has_shards, with_shards
from megatron_epp.planner.tables import Tables


def completed(
    order: Order, tables: Tables, made: Offload, caps: tuple[int, ...], split: bool, enough_us: float = 0.0, parts: int = 1
) -> tuple[Order, float]:
    """Insert the operations of vocabulary shards, if there are any, and split weight gradients off where that is faster.

    Args:
        order: forwards and whole backwards that fit the caps.
        tables, made, caps, enough_us, parts: as `with_split_weights` takes them.
        split: weight gradients may be split off.

    Returns:
        The order and its makespan in microseconds.
    """
    found = order
    if split:
        found, split_us = with_split_weights(order, tables, made, caps, enough_us, parts)
        if not has_shards(tables):
            return found, split_us
    copies = timed(made, tables)

    def time_us(tried: Order) -> float:
        return makespan_us(tried, tables, made.recompute_steps, copies)

    if not has_shards(tables):
        return order, time_us(order)
    tried = [with_shards(one, tables, made.recompute_steps) for one in ((order,) if found is order else (found, order))]
    took_us = list(map(time_us, tried))
    return min(zip(tried, took_us, strict=True), key=itemgetter(1))
