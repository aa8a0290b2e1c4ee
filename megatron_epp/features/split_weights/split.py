"""Weight gradients put into an order of whole backwards, where a rank would wait (`split_orders`)."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.planner.kernels.codes import BACKWARD, KIND_BITS, KIND_MASK, WEIGHT
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, compiled, float_zeros, floats, integer_zeros, integers
from megatron_epp.planner.kernels.live_bytes import leaves_bytes, step_bytes
from megatron_epp.planner.kernels.pass_table import PassTable
from megatron_epp.planner.kernels.timing import STUCK, arrived_us, durations

WHOLE_GAP = 1.0
"""Share of a weight gradient's time that a gap needs so that the rank's next action is never late."""
EAGER_GAP = 0.25
"""Share of a weight gradient's time that a gap needs for it to run there. With 1 many gradients find no gap and run at the end.
Set by hand: with 0, 0.25 or 0.5, alone or besides 1, plans differ by less than 0.2 % in the mean.
"""


class Whole(NamedTuple):
    """An order of forwards and whole backwards, and what its actions take."""

    actions: IntegerList
    starts: IntegerList
    # whole_us, split_us: time of actions by node, backwards with their weight gradients (`timing.durations`), and without
    whole_us: FloatList
    split_us: FloatList
    free: IntegerList  # bytes below the cap while each action runs, by position
    extra: IntegerList  # bytes that each backward needs more if its weight gradient is split off, by position
    # takes, gives: bytes that each action allocates and frees (`live_bytes.step_bytes`), by position
    takes: IntegerList
    gives: IntegerList
    # none, every: zeros and ones by item
    none: IntegerList
    every: IntegerList


class Filled(NamedTuple):
    """Results of `fill`, the actions of every rank with weight gradients, and its storage."""

    actions: IntegerList
    starts: IntegerList
    ends: IntegerList
    waiting: IntegerList  # items whose weight gradients wait or have waited, from each rank's start in `Whole.starts` on
    # first, last: of each rank, where the waiting ones begin and end
    first: IntegerList
    last: IntegerList
    waiting_bytes: IntegerList  # what they hold, by rank
    # at, clock_us: progress by rank
    at: IntegerList
    clock_us: FloatList
    ended_us: FloatList  # ends by node


def storage(actions: IntegerList, starts: IntegerList, columns: PassTable) -> tuple[Whole, Filled]:
    """Return storage for an order of forwards and whole backwards (`Codes`), and for the same with weight gradients."""
    count, ranks = len(actions), len(starts) - 1
    whole_us, split_us = floats(columns.action_us), floats(columns.action_us)
    free, extra, takes, gives = (integer_zeros(count) for _ in range(4))
    none, every = integer_zeros(columns.num_items), integers([1] * columns.num_items)
    filled, waiting, begins = integer_zeros(2 * count), integer_zeros(count), integers(2 * start for start in starts[:-1])
    ends, first, last, waiting_bytes, at = (integer_zeros(ranks) for _ in range(5))
    ended_us = float_zeros(len(columns.need_starts) - 1)
    return (
        Whole(actions, starts, whole_us, split_us, free, extra, takes, gives, none, every),
        Filled(filled, begins, ends, waiting, first, last, waiting_bytes, at, float_zeros(ranks), ended_us),
    )


@compiled
def split_off(
    whole: Whole,
    columns: PassTable,
    recompute_steps: IntegerList,
    caps: IntegerList,
    away: IntegerList,
    filled: Filled,
    gap_share: float,
) -> float:
    """Put weight gradients into an order, and return its makespan in microseconds, or `STUCK` if it deadlocks.

    All but the order in `whole` is written. `away` are bytes that copies have taken away while each action runs, by position,
    or empty. A gap needs `gap_share` of a weight gradient's time for it to run there.
    """
    durations(columns, recompute_steps, whole.none, whole.whole_us)
    durations(columns, recompute_steps, whole.every, whole.split_us)
    step_bytes(whole.actions, columns, recompute_steps, whole.none, whole.takes, whole.gives)
    spare_bytes(columns, recompute_steps, caps, away, whole)
    if not fill(whole, columns, filled, gap_share):
        return STUCK
    makespan_us = 0.0
    for rank in range(len(filled.clock_us)):
        makespan_us = max(makespan_us, filled.clock_us[rank])
    return makespan_us


@compiled
def spare_bytes(columns: PassTable, recompute_steps: IntegerList, caps: IntegerList, away: IntegerList, whole: Whole) -> None:
    """Compute `Whole.free` and `Whole.extra`. Arguments as in `split_off`."""
    # Summed once: splitting adds nothing but `extra` and what waits (`Filled.waiting_bytes`), which `advance` counts.
    for rank in range(len(whole.starts) - 1):
        live = columns.static[rank]
        for at in range(whole.starts[rank], whole.starts[rank + 1]):
            live += whole.takes[at]
            whole.free[at] = caps[rank] - live + (away[at] if len(away) > 0 else 0)
            live -= whole.gives[at]
            item, whole.extra[at] = whole.actions[at] >> KIND_BITS, 0
            if whole.actions[at] & KIND_MASK == BACKWARD:
                way = columns.first_way[item] + recompute_steps[item]
                whole.extra[at] = max(0, columns.split[way] - columns.whole[way])


@compiled
def fill(whole: Whole, columns: PassTable, filled: Filled, gap_share: float) -> bool:
    """Play an order and put weight gradients in as it goes; False if it deadlocks. Arguments as in `split_off`."""
    ranks = len(whole.starts) - 1
    for node in range(len(filled.ended_us)):
        filled.ended_us[node] = -1.0
    for rank in range(ranks):
        filled.at[rank] = filled.first[rank] = filled.last[rank] = whole.starts[rank]
        filled.ends[rank] = filled.starts[rank]
        filled.waiting_bytes[rank], filled.clock_us[rank] = 0, 0.0
    left, down = len(whole.actions), True  # in turn down and up the ranks: on 8 of them 7 sweeps, all downwards 17
    while left > 0:
        moved = 0
        for turn in range(ranks):
            moved += advance(turn if down else ranks - 1 - turn, whole, columns, filled, gap_share)
        if moved == 0:
            return False
        left -= moved
        down = not down
    for rank in range(ranks):
        while filled.first[rank] < filled.last[rank]:
            run_weight(rank, columns, filled)
    return True


@compiled
def advance(rank: int, whole: Whole, columns: PassTable, filled: Filled, gap_share: float) -> int:
    """Run a rank as far as it goes, and return how many of the order's actions it ran. Arguments as in `fill`."""
    items, ended_us = columns.num_items, filled.ended_us
    begin = at = filled.at[rank]
    while at < whole.starts[rank + 1]:
        kind, item = whole.actions[at] & KIND_MASK, whole.actions[at] >> KIND_BITS
        node = kind * items + item
        arrived = arrived_us(node, columns, ended_us)
        if arrived < 0.0:
            break
        free, extra = whole.free[at], whole.extra[at]
        # First come first served: with the last one first, 8 plans of 76 were slower, by up to 1 %, 3 faster, by up to 0.2 %.
        while filled.first[rank] < filled.last[rank]:
            weight_us = columns.action_us[WEIGHT * items + filled.waiting[filled.first[rank]]]
            if filled.waiting_bytes[rank] + extra <= free and filled.clock_us[rank] + weight_us * gap_share > arrived:
                break
            run_weight(rank, columns, filled)
        is_split = kind == BACKWARD and extra <= free and leaves_bytes(columns, item)
        is_split = is_split and columns.action_us[WEIGHT * columns.num_items + item] > 0  # else there is no time to delay
        filled.actions[filled.ends[rank]] = whole.actions[at]
        filled.ends[rank] += 1
        took_us = whole.split_us[node] if is_split else whole.whole_us[node]
        filled.clock_us[rank] = max(arrived, filled.clock_us[rank]) + took_us
        ended_us[node] = filled.clock_us[rank]
        if is_split:
            filled.waiting[filled.last[rank]] = item
            filled.last[rank] += 1
            filled.waiting_bytes[rank] += columns.weight_bytes[item]
        at += 1
    filled.at[rank] = at
    return at - begin


@compiled
def run_weight(rank: int, columns: PassTable, filled: Filled) -> None:
    """Run the weight gradient that has waited longest on a rank. Arguments as in `fill`."""
    item = filled.waiting[filled.first[rank]]
    filled.first[rank] += 1
    filled.actions[filled.ends[rank]] = item << KIND_BITS | WEIGHT
    filled.ends[rank] += 1
    filled.clock_us[rank] += columns.action_us[WEIGHT * columns.num_items + item]
    filled.waiting_bytes[rank] -= columns.weight_bytes[item]
