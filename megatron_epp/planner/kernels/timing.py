"""Start and end of every action of an order: the arithmetic of `simulate`, reduced to the needs of a search."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.planner.kernels.codes import BACKWARD, KIND_BITS, KIND_MASK, WEIGHT
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, compiled, inlined
from megatron_epp.planner.kernels.pass_table import PassTable

STUCK = -1.0
"""Returned when the order deadlocks."""


class Room(NamedTuple):
    """Storage that `play` writes: times by position in the codes, progress by rank, ends by node (`PassTable.needs`)."""

    start_us: FloatList
    end_us: FloatList
    at: IntegerList
    clock_us: FloatList
    ended_us: FloatList


class CopyColumns(NamedTuple):
    """Offloads and loads of every rank in their order; one runs at a time on a rank, and in either direction of a link."""

    # items, is_load, time_us, starts: of each copy, rank by rank
    items: IntegerList
    is_load: IntegerList
    time_us: FloatList
    after: IntegerList  # the index among the codes' actions whose end each waits for, or -1
    starts: IntegerList
    load_of: IntegerList  # index of the load of each item among all copies, or -1
    links: IntegerList  # of each rank, the link that it shares or has
    # start_us, end_us, at, clock_us, lane_us: where `play` writes; the last, when either direction of a link is free
    start_us: FloatList
    end_us: FloatList
    at: IntegerList
    clock_us: FloatList
    lane_us: FloatList


@compiled
def play(
    actions: IntegerList, starts: IntegerList, columns: PassTable, took_us: FloatList, copies: CopyColumns, room: Room
) -> float:
    """Compute the makespan of an order with actions of `took_us` by node, in microseconds; `STUCK` if it deadlocks.

    On every rank, the slices of a sequence ascend in forward and descend in backward, which is then all that they ask for.
    """
    ranks = len(starts) - 1
    for node in range(len(room.ended_us)):
        room.ended_us[node] = -1.0
    for rank in range(ranks):
        room.at[rank] = starts[rank]
        room.clock_us[rank] = 0.0
    for rank in range(len(copies.starts) - 1):
        copies.at[rank] = copies.starts[rank]
        copies.clock_us[rank] = 0.0
    for lane in range(len(copies.lane_us)):
        copies.lane_us[lane] = 0.0
    for at in range(len(copies.items)):
        copies.end_us[at] = -1.0
    left, copying = len(actions), len(copies.items)
    down = True  # then up, and so on: forwards are handed down the ranks, backwards up
    while left > 0:
        moved = 0
        for turn in range(ranks):
            moved += advance(turn if down else ranks - 1 - turn, actions, starts, columns, took_us, copies, room)
        left -= moved
        down = not down
        while moved == 0:
            rank = take_turn(copies, room)
            if rank < 0:
                return STUCK
            copying -= 1
            moved = advance(rank, actions, starts, columns, took_us, copies, room)
            left -= moved
    makespan_us = 0.0
    for rank in range(ranks):
        makespan_us = max(makespan_us, room.clock_us[rank])
    while copying > 0:
        if take_turn(copies, room) < 0:
            return STUCK
        copying -= 1
    return makespan_us


@compiled
def advance(
    rank: int,
    actions: IntegerList,
    starts: IntegerList,
    columns: PassTable,
    took_us: FloatList,
    copies: CopyColumns,
    room: Room,
) -> int:
    """Run a rank as far as it goes, and return the number of actions that it ran. Arguments as in `play`."""
    items, loads = columns.num_items, len(copies.load_of)
    ended_us = room.ended_us
    now = room.clock_us[rank]
    begin = at = room.at[rank]
    stop = starts[rank + 1]
    while at < stop:
        code = actions[at]
        kind, item = code & KIND_MASK, code >> KIND_BITS
        node = kind * items + item
        arrived = arrived_us(node, columns, ended_us)
        start, ready = max(now, arrived), arrived >= 0.0
        if kind == BACKWARD and loads > 0 and copies.load_of[item] >= 0:
            loaded = copies.end_us[copies.load_of[item]]
            if loaded < 0.0:
                ready = False
            elif loaded > start:
                start = loaded
        if not ready:
            break
        now = start + took_us[node]
        ended_us[node] = now
        room.start_us[at] = start
        room.end_us[at] = now
        at += 1
    room.clock_us[rank] = now
    room.at[rank] = at
    return at - begin


@inlined
def arrived_us(node: int, columns: PassTable, ended_us: FloatList) -> float:
    """Time at which all is there that an action needs from other sites; negative if something has not run."""
    last_us = 0.0
    for edge in range(columns.need_starts[node], columns.need_starts[node + 1]):
        ended = ended_us[columns.needs[edge]]
        if ended < 0.0:
            return -1.0
        last_us = max(last_us, ended + columns.need_us[edge])
    return last_us


@compiled
def take_turn(copies: CopyColumns, room: Room) -> int:
    """Run the copy that came first among copies that can start (`plan.simulation.play`); its rank, or -1 if none can."""
    first, came_us = -1, 0.0
    for rank in range(len(copies.starts) - 1):
        at = copies.at[rank]
        if at == copies.starts[rank + 1]:
            continue
        came = copies.clock_us[rank]
        if copies.is_load[at] == 0:
            ended = room.ended_us[copies.items[at]]  # of its forward
            if ended < 0.0:
                continue
            if ended > came:
                came = ended
        after = copies.after[at]
        if after >= 0:
            if after >= room.at[rank]:
                continue
            if room.end_us[after] > came:
                came = room.end_us[after]
        if first < 0 or came < came_us:
            first, came_us = rank, came
    if first < 0:
        return -1
    at = copies.at[first]
    lane = 2 * copies.links[first] + copies.is_load[at]
    begin = copies.lane_us[lane] if copies.lane_us[lane] > came_us else came_us
    copies.start_us[at] = begin
    ended = begin + copies.time_us[at]
    copies.end_us[at] = copies.lane_us[lane] = copies.clock_us[first] = ended
    copies.at[first] = at + 1
    return first


@compiled
def durations(columns: PassTable, recompute_steps: IntegerList, split: IntegerList, out: FloatList) -> None:
    """Compute the times of backwards by node with recompute, without the weight gradients that `split` marks by item."""
    items = columns.num_items
    for item in range(len(recompute_steps)):
        again_us = columns.again_us[columns.first_way[item] + recompute_steps[item]]
        time_us = columns.action_us[BACKWARD * items + item] + again_us
        if split[item]:
            time_us -= columns.saved_by_split_us[item]
        out[BACKWARD * items + item] = time_us


@compiled
def mark_split(actions: IntegerList, split: IntegerList) -> None:
    for item in range(len(split)):
        split[item] = 0
    for at in range(len(actions)):
        if (actions[at] & KIND_MASK) == WEIGHT:
            split[actions[at] >> KIND_BITS] = 1
