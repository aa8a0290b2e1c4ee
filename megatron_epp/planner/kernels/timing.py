"""Start and end of every action of an order: the arithmetic of `simulate`, reduced to the needs of a search."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.planner.kernels.climb import climbed
from megatron_epp.planner.kernels.columns import BACKWARD, FORWARD, WEIGHT, Columns
from megatron_epp.planner.kernels.compiled import Floats, Integers, compiled

STUCK = -1.0
"""Returned when the order deadlocks."""


class Room(NamedTuple):
    """Storage that `play` writes: times by position in the codes, progress by rank, arrivals by item."""

    start_us: Floats
    end_us: Floats
    at: Integers
    clock_us: Floats
    forward_in: Floats
    backward_in: Floats
    forward_end: Floats


class Copies(NamedTuple):
    """Offloads and loads of every rank in their order; one runs at a time on a rank, and in either direction of a link.

    Attributes:
        items, is_load, time_us, starts: of each copy, rank by rank.
        after: the place among the codes' actions whose end each waits for, or -1.
        place: of the load of each item among all copies, or -1.
        links: of each rank, the link that it shares or has.
        start_us, end_us, at, clock_us: where `play` writes.
        lane_us: the same; when either direction of a link is free.
    """

    items: Integers
    is_load: Integers
    time_us: Floats
    after: Integers
    starts: Integers
    place: Integers
    links: Integers
    start_us: Floats
    end_us: Floats
    at: Integers
    clock_us: Floats
    lane_us: Floats


@compiled
def play(actions: Integers, starts: Integers, columns: Columns, backward_us: Floats, copies: Copies, room: Room) -> float:
    """Compute the makespan of an order, in microseconds; `STUCK` if it deadlocks.

    An order has the slices of a sequence ascending in forward and descending in backward on every rank, which is then all they
    ask for.

    Args:
        actions, starts: the order (`Codes`).
        columns: times by item.
        backward_us: by item, with recompute, without a weight gradient that is an action of its own.
        copies: offloads and loads of every rank.
        room: storage for the results.
    """
    ranks = len(starts) - 1
    first, last = columns.num_chunks, (columns.num_stages - 1) * columns.num_chunks
    for item in range(len(room.forward_in)):
        room.forward_in[item] = 0.0 if item < first else -1.0
        room.backward_in[item] = 0.0 if item >= last else -1.0
        room.forward_end[item] = -1.0
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
    down = True
    while left > 0:
        moved = 0
        for turn in range(ranks):
            moved += advance(turn if down else ranks - 1 - turn, actions, starts, columns, backward_us, copies, room)
        left -= moved
        down = not down
        while moved == 0:
            rank = take_turn(copies, room)
            if rank < 0:
                return STUCK
            copying -= 1
            moved = advance(rank, actions, starts, columns, backward_us, copies, room)
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
    actions: Integers,
    starts: Integers,
    columns: Columns,
    backward_us: Floats,
    copies: Copies,
    room: Room,
) -> int:
    """Run a rank as far as it goes; how many actions that were."""
    chunks, stages = columns.num_chunks, columns.num_stages
    forward_in, backward_in = room.forward_in, room.backward_in
    now = room.clock_us[rank]
    begin = at = room.at[rank]
    stop = starts[rank + 1]
    while at < stop:
        code = actions[at]
        item, op = code // 3, code % 3
        if op == FORWARD:
            arrived = forward_in[item]
            if arrived < 0.0:
                break
            start = arrived if arrived > now else now
            now = start + columns.forward_us[item]
            room.forward_end[item] = now
            if item + chunks < stages * chunks:
                forward_in[item + chunks] = now + columns.hops[item]
        elif op == BACKWARD:
            arrived = backward_in[item]
            if arrived < 0.0:
                break
            start = arrived if arrived > now else now
            if len(copies.place) > 0 and copies.place[item] >= 0:
                loaded = copies.end_us[copies.place[item]]
                if loaded < 0.0:
                    break
                if loaded > start:
                    start = loaded
            now = start + backward_us[item]
            if item >= chunks:
                backward_in[item - chunks] = now + columns.hops[item - chunks]
        else:
            start = now
            now = start + columns.weight_us[item]
        room.start_us[at] = start
        room.end_us[at] = now
        at += 1
    room.clock_us[rank] = now
    room.at[rank] = at
    return at - begin


@compiled
def take_turn(copies: Copies, room: Room) -> int:
    """Run the copy that came first of those that could start (`plan.simulate.play`); its rank, or -1 where none could."""
    first, came_us = -1, 0.0
    for rank in range(len(copies.starts) - 1):
        at = copies.at[rank]
        if at == copies.starts[rank + 1]:
            continue
        came = copies.clock_us[rank]
        if copies.is_load[at] == 0:
            ended = room.forward_end[copies.items[at]]
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
def backward_times(columns: Columns, layers: Integers, split: Integers, out: Floats) -> None:
    """Times of backwards with recompute, without the weight gradients that `split` marks. All by item."""
    for item in range(len(layers)):
        again_us = climbed(columns.layer_us, item * columns.num_rungs, columns.layers[item], layers[item])
        time_us = columns.backward_us[item] + again_us
        if split[item]:
            time_us -= columns.weight_us[item]
        out[item] = time_us


@compiled
def mark_split(actions: Integers, split: Integers) -> None:
    """Mark the items whose weight gradient is an action of its own."""
    for item in range(len(split)):
        split[item] = 0
    for at in range(len(actions)):
        if actions[at] % 3 == WEIGHT:
            split[actions[at] // 3] = 1
