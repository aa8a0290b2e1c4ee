"""Weight gradients split off the backwards of an order, to run where a rank would wait, at the latest when memory is needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from megatron_epp.features.split_weights import split
from megatron_epp.plan import PlanError
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us, play
from megatron_epp.planner.kernels import timing
from megatron_epp.planner.kernels.codes import CodedOrder, Codes, encode_known
from megatron_epp.planner.kernels.compiled import integers, numbers
from megatron_epp.planner.memory.offload import Offload, away_bytes, peaks_with_copies, timed
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.completion import peaks
from megatron_epp.planner.tables import Tables

ROUNDS = 8
"""Rounds in which fewer weight gradients are delayed, where copies overlap the order. With 4 or 16 no plan of 24 differs."""


def with_split_weights(
    order: Order, tables: Tables, offload: Offload, caps: tuple[int, ...], enough_us: float = 0.0
) -> tuple[Order, float]:
    """Split weight gradients off where that is faster; return the faster order and its makespan in microseconds.

    They wait as the caps let them: for gaps that they fit into, or for gaps of at least `EAGER_GAP` of their time. Where that
    takes longer than `enough_us`, they wait within the peaks of whole backwards: then they run sooner, which may be faster.
    """
    whole = encode_known(order, tables.columns.num_chunks)
    before = play(whole, tables, offload.recompute_steps, timed(offload, tables)) if offload.copies else None
    best = whole
    best_us = makespan_us(whole, tables, offload.recompute_steps) if before is None else before.makespan_us
    # With the caps alone, 18 of 254 plans got slower with more memory, by up to 2.6 %; with these peaks too 10, by up to 0.9 %.
    own = tuple(map(min, caps, peaks(whole, tables, offload, before)))
    away = [] if before is None else away_bytes(tables, offload, before)
    for aims, gap_share in ((caps, split.WHOLE_GAP), *((aims, split.EAGER_GAP) for aims in dict.fromkeys((caps, own)))):
        result = split_with_copies(whole, tables, offload, aims, away, gap_share)
        if result is not None and result[1] < best_us:
            best, best_us = result
        if best_us <= enough_us:
            break
    return order if best is whole else CodedOrder(best, tables.columns.num_chunks), best_us


def split_with_copies(
    order: Codes, tables: Tables, offload: Offload, caps: tuple[int, ...], away: Sequence[Sequence[int]], gap_share: float
) -> tuple[Codes, float] | None:
    """Split weight gradients off an order, which may be overlapped with copies that have taken `away` bytes.

    Copies start at the ends of the same actions, as soon as their links are free. Where a rank then comes out above its cap,
    fewer gradients wait, each time twice as many fewer as seems needed. Returns the order and its makespan in microseconds, or
    None if a rank is above its cap after all rounds.
    """
    if not offload.copies:
        codes = split_weights(order, tables, offload.recompute_steps, caps, (), gap_share)
        return codes, makespan_us(codes, tables, offload.recompute_steps)
    copies, aims = timed(offload, tables), list(caps)
    for tries in range(ROUNDS):
        codes = split_weights(order, tables, offload.recompute_steps, aims, away, gap_share)
        after = play(codes, tables, offload.recompute_steps, copies)
        above = [peak - cap for peak, cap in zip(peaks_with_copies(codes, tables, offload, after), caps, strict=True)]
        if max(above) <= 0:
            return codes, after.makespan_us
        aims = [aim - max(0, over << tries) for aim, over in zip(aims, above, strict=True)]
    return None


def split_weights(
    order: Codes,
    tables: Tables,
    recompute_steps: RecomputeSteps,
    caps: Sequence[int],
    away: Sequence[Sequence[int]],
    gap_share: float,
) -> Codes:
    """Split the weight gradients off the backwards of an order that fits the caps with `recompute_steps`.

    A backward then passes its gradient on sooner, and its weight gradient waits, first come first served, for a gap until the
    next action's input that it fits into, or that has `gap_share` of its time. Where the waiting ones would lift the rank above
    its cap, they run before; where even a single one would, the backward stays whole, as does one without anything to delay.

    Copies have taken `away`, ``[rank][position]`` bytes, while an action runs. Raises `PlanError` if the order deadlocks.
    """
    columns, steps = tables.columns_with(order.kinds), integers(chain.from_iterable(recompute_steps))
    whole, filled = split.storage(order.actions, order.starts, columns)
    if (
        split.split_off(whole, columns, steps, integers(caps), integers(chain.from_iterable(away)), filled, gap_share)
        == timing.STUCK
    ):
        raise PlanError("the order deadlocks before any weight gradient is split off")
    rows = [numbers(filled.actions[start:end]) for start, end in zip(filled.starts, filled.ends, strict=True)]
    return Codes(integers(chain.from_iterable(rows)), integers(accumulate(map(len, rows), initial=0)), order.kinds)
