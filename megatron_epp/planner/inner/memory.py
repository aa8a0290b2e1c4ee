"""What is live along a rank's list, and the recompute that keeps it under a cap."""

from __future__ import annotations

import heapq

from megatron_epp.planner.inner.columns import BACKWARD, FORWARD, Columns
from megatron_epp.planner.inner.compiled import Integers, compiled


@compiled
def kept(columns: Columns, item: int, layers: int) -> int:
    """Activations from forward to backward when so many layers recompute."""
    return columns.activation[item] - layers * columns.saved[item]


@compiled
def own(columns: Columns, item: int, layers: int) -> int:
    """The most that a backward and its chunk's activations hold together: `Tables.rise_bytes` above `kept`.

    It never grows with the layers that recompute.
    """
    held = columns.activation[item] - layers * columns.saved[item]
    made = columns.saved[item] if layers > 0 and layers == columns.most[item] else 0
    return max(held, held + columns.first[item] + made, columns.last[item], columns.net[item])


@compiled
def peak(actions: Integers, begin: int, stop: int, columns: Columns, layers: Integers, static: int) -> int:
    """Most bytes live at one time while a rank runs ``actions[begin:stop]``. layers: by item, of all stages."""
    live = most = static
    for at in range(begin, stop):
        item, op = actions[at] // 3, actions[at] % 3
        if op == FORWARD:
            live += kept(columns, item, layers[item]) + columns.forward_alloc[item]
            most = max(most, live)
            live -= columns.forward_free[item]
        elif op == BACKWARD:
            live -= kept(columns, item, layers[item])
            most = max(most, live + own(columns, item, layers[item]))
            live += columns.net[item]
    return most


@compiled
def sweep(
    actions: Integers,
    begin: int,
    stop: int,
    columns: Columns,
    limit: Integers,
    cap: int,
    static: int,
    layers: Integers,
    leaves: Integers,
) -> bool:
    """Walk along a rank's list; wherever it is above the cap, recompute more of what is alive.

    What is alive gives up layers in the order of bytes saved per time of recompute, and among equals what stays longest.
    Raising the recompute of a chunk takes nothing from the past, so one walk is enough, and it finds a way wherever there is
    one within the limits.

    Args:
        limit: most layers of each item that may recompute.
        layers: where the answer goes; items of other ranks are left alone.
        leaves: room for a number per item.

    Returns:
        Whether the rank stays under its cap.
    """
    for at in range(begin, stop):
        item = actions[at] // 3
        layers[item] = 0
        leaves[item] = at
    alive = [(0.0, 0, 0)]  # cheapest first; what has left or has nothing left to give is dropped when it comes up
    alive.pop()
    live = static
    for at in range(begin, stop):
        item, op = actions[at] // 3, actions[at] % 3
        if op == FORWARD:
            live += columns.activation[item] + columns.forward_alloc[item]
            if columns.saved[item] > 0 and limit[item] > 0:
                heapq.heappush(alive, (columns.price[item], -leaves[item], item))
            while live > cap and len(alive) > 0:
                other = alive[0][2]
                less = give(columns, other, limit, layers, live - cap) if leaves[other] > at else 0
                live -= less
                if less == 0:
                    heapq.heappop(alive)
            if live > cap:
                return False
            live -= columns.forward_free[item]
        elif op == BACKWARD:
            live -= kept(columns, item, layers[item])
            held = own(columns, item, layers[item])
            while live + held > cap and len(alive) > 0:
                other = alive[0][2]
                if other == item and layers[item] < limit[item] and own(columns, item, layers[item] + 1) < held:
                    layers[item] += 1
                    held = own(columns, item, layers[item])
                    continue
                less = give(columns, other, limit, layers, live + held - cap) if leaves[other] > at else 0
                live -= less
                if less == 0:
                    heapq.heappop(alive)
            if live + held > cap:
                return False
            live += columns.net[item]
    return True


@compiled
def give(columns: Columns, item: int, limit: Integers, layers: Integers, excess: int) -> int:
    """Recompute more layers of an item, as many as the excess asks for and the limit leaves; the bytes that saves."""
    saved = columns.saved[item]
    count = min(limit[item] - layers[item], -(-excess // saved))
    layers[item] += count
    return count * saved


@compiled
def trim(
    actions: Integers, begin: int, stop: int, columns: Columns, layers: Integers, cap: int, static: int, places: Integers
) -> None:
    """Take back recompute that is not needed after all, dearest first.

    Args:
        places: the rank's items, dearest first.
    """
    for place in range(len(places)):
        item = places[place]
        while layers[item] > 0:
            layers[item] -= 1
            if peak(actions, begin, stop, columns, layers, static) > cap:
                layers[item] += 1
                break
