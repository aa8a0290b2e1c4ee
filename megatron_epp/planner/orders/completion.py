"""Completion of an order of forwards and backwards: added operations, and weight gradients of their own."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pkgutil import resolve_name

from megatron_epp.plan.operations import operation
from megatron_epp.planner.evaluate import Played, RecomputeSteps, makespan_us, play
from megatron_epp.planner.fit import held_bytes, peaks_of
from megatron_epp.planner.kernels.codes import Codes
from megatron_epp.planner.memory.offload import Offload, peaks_with_copies, timed
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables

Splitting = Callable[[Order, Tables, Offload, tuple[int, ...], float], tuple[Order, float]]
"""Function that splits weight gradients off an order, under caps, where that is faster, or until an order takes no longer than
a time; returns the order and its makespan in microseconds.
"""


def has_added(tables: Tables) -> bool:
    """True if the costs have operations that are inserted into orders."""
    return any(operation(op).inserted for op in tables.added)


def with_added(order: Order, tables: Tables, recompute_steps: RecomputeSteps) -> Order:
    """Insert the operations that the costs have besides (`Operation.inserted`), of which the order has none yet."""
    for op in tables.added:
        inserted = operation(op).inserted
        if inserted and not any(action.op is op for row in order for action in row):
            order = resolve_name(inserted)(order, tables, recompute_steps)
    return order


def completed(
    order: Order, tables: Tables, offload: Offload, caps: tuple[int, ...], split: Splitting | None, enough_us: float = 0.0
) -> tuple[Order, float]:
    """Insert added operations, if there are any, and split weight gradients off if that is asked for; return the faster order
    and its makespan in microseconds.
    """
    split_order = order
    if split is not None:
        split_order, split_us = split(order, tables, offload, caps, enough_us)
        if not has_added(tables):
            return split_order, split_us
    variants, copies = (order,) if split_order is order else (split_order, order), timed(offload, tables)
    tried = [with_added(variant, tables, offload.recompute_steps) for variant in variants]
    times_us = [makespan_us(each, tables, offload.recompute_steps, copies) for each in tried]
    return min(zip(tried, times_us, strict=True), key=itemgetter(1))


def peaks(order: Order | Codes, tables: Tables, offload: Offload, played: Played | None = None) -> list[int]:
    """Compute the most bytes that each rank holds, with the copies that the order is overlapped with, as it was `played`."""
    if offload.copies:
        times = played or play(order, tables, offload.recompute_steps, timed(offload, tables))
        return peaks_with_copies(order, tables, offload, times)
    return peaks_of(held_bytes(order, tables, offload.recompute_steps))
