"""Live bytes along a rank's list of actions, and the recompute that keeps them under a cap."""

from __future__ import annotations

import heapq

from megatron_epp.planner.kernels.climb import climbed
from megatron_epp.planner.kernels.columns import ADDED, BACKWARD, FORWARD, KIND_BITS, KIND_MASK, Columns
from megatron_epp.planner.kernels.compiled import Integers, compiled


@compiled
def kept(columns: Columns, item: int, taken: int) -> int:
    """Bytes of activations kept from forward to backward after `taken` recompute steps."""
    return columns.activation[item] - climbed(columns.saved, item * columns.num_rungs, columns.layers[item], taken)


@compiled
def risen(columns: Columns, item: int, taken: int, apart: bool) -> int:
    """Compute the peak bytes of a chunk's backward above those live when it starts, after `taken` recompute steps.

    A backward goes through the stage from its end. The bytes that the head kept go first. At each layer there are more for a
    while: what recompute makes again, or the gradient of its keys and values, of which the latter stays. Then the bytes that
    the layer kept go, and with a sequence's first slice its keys and values and their gradient.

    The layers with fewest steps come first. Layers with equally many steps are equal, so the peak is at the first or at the
    last of them; and as those that come later keep less, the last of the former is never the one.

    Args:
        columns: sizes by item.
        item: the stage and chunk.
        taken: recompute steps.
        apart: the weight gradient is split off: the backward keeps its inputs, of the head and of every layer that it has
            passed.
    """
    layers = columns.layers[item]
    full, rest, rung = (taken // layers, taken % layers, item * columns.num_rungs) if layers > 0 else (0, 0, 0)
    live, passed, surge = -columns.head[item], columns.passed[item], columns.surge[item]
    if apart:
        live += columns.weight_bytes[item] - layers * columns.weight_layer[item]
        passed -= columns.weight_layer[item]
        surge = columns.weight_surge[item]
    if layers == 0:
        return columns.throughout[item] + max(0, live)
    for at in range(rung, rung + full):
        passed -= columns.saved[at]
        surge += columns.saved[at]
        if not apart:
            surge += columns.fuller[at]
    most = max(0, live + surge)
    if rest > 0:
        live -= (layers - rest) * passed
        passed -= columns.saved[rung + full]
        surge += columns.saved[rung + full]
        if not apart:
            surge += columns.fuller[rung + full]
        most = max(most, live + surge)
        return columns.throughout[item] + max(most, live - (rest - 1) * passed + surge)
    return columns.throughout[item] + max(most, live - (layers - 1) * passed + surge)


@compiled
def own(columns: Columns, item: int, taken: int) -> int:
    """Peak bytes of a backward and its chunk's activations together, where it computes the weight gradients itself.

    It never grows with `taken`, except where layers that recompute hold more bytes while their own backward runs.
    """
    return max(kept(columns, item, taken) + risen(columns, item, taken, False), columns.net[item])


@compiled
def peak(actions: Integers, begin: int, stop: int, columns: Columns, layers: Integers, static: int) -> int:
    """Compute the most bytes live at one time while a rank runs ``actions[begin:stop]``.

    Args:
        actions: of all ranks (`Codes.actions`).
        begin, stop: the part of one rank.
        columns: sizes by item.
        layers: recompute steps by item, of all stages.
        static: bytes that the rank holds throughout.
    """
    live = most = static
    for at in range(begin, stop):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        if op == FORWARD:
            live += kept(columns, item, layers[item]) + columns.forward_alloc[item]
            most = max(most, live)
            live -= columns.forward_free[item]
        elif op == BACKWARD:
            live -= kept(columns, item, layers[item])
            most = max(most, live + own(columns, item, layers[item]))
            live += columns.net[item]
        elif op >= ADDED:
            added = (op - ADDED) * columns.num_items + item
            live += columns.added_takes[added]
            most = max(most, live)
            live -= columns.added_gives[added]
    return most


@compiled
def levels(actions: Integers, columns: Columns, layers: Integers, split: Integers, takes: Integers, gives: Integers) -> None:
    """Compute the bytes that each action allocates when it starts and frees when it ends.

    Args:
        actions: of all ranks (`Codes.actions`).
        columns: sizes by item.
        layers: recompute steps by item, of all stages.
        split: by item, nonzero if its weight gradient is an action of its own, for which its backward leaves bytes.
        takes, gives: the results, by place among the actions.
    """
    for at in range(len(actions)):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        if op >= ADDED:
            added = (op - ADDED) * columns.num_items + item
            takes[at], gives[at] = columns.added_takes[added], columns.added_gives[added]
            continue
        stays = kept(columns, item, layers[item])
        if op == FORWARD:
            takes[at] = stays + columns.forward_alloc[item]
            gives[at] = columns.forward_free[item]
        elif op == BACKWARD:
            held = columns.weight_bytes[item] if split[item] else 0
            growth = columns.net[item] - stays + held
            takes[at] = max(risen(columns, item, layers[item], split[item] != 0), growth)
            gives[at] = takes[at] - growth
        else:
            takes[at] = 0
            gives[at] = columns.weight_bytes[item]


@compiled
def sweep(
    actions: Integers,
    begin: int,
    stop: int,
    columns: Columns,
    limit: Integers,
    caps: Integers,
    static: int,
    layers: Integers,
    leaves: Integers,
) -> bool:
    """Walk along a rank's list and, wherever it is above the cap, recompute more of the chunks that are alive.

    Recompute steps are taken in the order of bytes saved per time of recompute, and among equals on the chunk that stays
    longest. More recompute of a chunk adds no bytes to earlier actions, so one walk is enough, and it finds a solution wherever
    there is one within the limits.

    Args:
        actions: of all ranks (`Codes.actions`).
        begin, stop: the part of one rank.
        columns: sizes by item.
        limit: most recompute steps of each item.
        caps: bytes, by place among the actions.
        static: bytes that the rank holds throughout.
        layers: the result, by item; items of other ranks are left alone.
        leaves: working storage, a number per item.

    Returns:
        True if the rank stays under its cap.
    """
    for at in range(begin, stop):
        if actions[at] & KIND_MASK < ADDED:
            item = actions[at] >> KIND_BITS
            layers[item] = 0
            leaves[item] = at
    alive = [(0.0, 0, 0)]  # cheapest first; what has left or has nothing left to give is dropped when it comes up
    alive.pop()
    live = static
    for at in range(begin, stop):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        if op == FORWARD:
            live += columns.activation[item] + columns.forward_alloc[item]
            if columns.saved[item * columns.num_rungs] > 0 and limit[item] > 0:
                heapq.heappush(alive, (columns.price[item * columns.num_rungs], -leaves[item], item))
            live = give_until(live, caps[at], alive, columns, limit, layers, leaves, at)
            if live > caps[at]:
                return False
            live -= columns.forward_free[item]
        elif op == BACKWARD:
            live -= kept(columns, item, layers[item])
            held = own(columns, item, layers[item])
            while live + held > caps[at] and len(alive) > 0:
                other = alive[0][2]
                if other == item and layers[item] < limit[item] and own(columns, item, limit[item]) < held:
                    layers[item] += 1
                    held = own(columns, item, layers[item])
                    continue
                live -= give_cheapest(alive, columns, limit, layers, leaves, at, live + held - caps[at])
            if live + held > caps[at]:
                return False
            live += columns.net[item]
        elif op >= ADDED:
            added = (op - ADDED) * columns.num_items + item
            live = give_until(live + columns.added_takes[added], caps[at], alive, columns, limit, layers, leaves, at)
            if live > caps[at]:
                return False
            live -= columns.added_gives[added]
    return True


@compiled
def fit(
    actions: Integers, starts: Integers, columns: Columns, caps: Integers, caps_at: Integers, layers: Integers, leaves: Integers
) -> bool:
    """Have every rank that is above its cap recompute as much as `sweep` finds; True if all stay under theirs.

    Args:
        actions, starts: the order (`Codes`).
        columns: sizes by item.
        caps: bytes of every rank.
        caps_at: the same by place among the actions.
        layers: the result, by item; zeros before.
        leaves: working storage, a number per item.
    """
    for rank in range(len(starts) - 1):
        begin, stop, static = starts[rank], starts[rank + 1], columns.static[rank]
        if peak(actions, begin, stop, columns, layers, static) <= caps[rank]:
            continue
        if not sweep(actions, begin, stop, columns, columns.most, caps_at, static, layers, leaves):
            return False
    return True


@compiled
def give_until(
    live: int,
    cap: int,
    alive: list[tuple[float, int, int]],
    columns: Columns,
    limit: Integers,
    layers: Integers,
    leaves: Integers,
    at: int,
) -> int:
    """Take recompute steps until the live bytes are within a cap or none are left; return the live bytes.

    Args:
        live, cap: bytes.
        alive, columns, limit, layers, leaves, at: as for `give_cheapest`.
    """
    while live > cap and len(alive) > 0:
        live -= give_cheapest(alive, columns, limit, layers, leaves, at, live - cap)
    return live


@compiled
def give_cheapest(
    alive: list[tuple[float, int, int]],
    columns: Columns,
    limit: Integers,
    layers: Integers,
    leaves: Integers,
    at: int,
    excess: int,
) -> int:
    """Take recompute steps on the cheapest chunk that is alive, as many as the excess asks for; return the bytes saved.

    A chunk that has left, or is at its limit, is dropped. A chunk whose layers have all reached a level gets the price of the
    next.

    Args:
        alive: heap of ``(price, -place where it leaves, item)``.
        columns: sizes by item.
        limit: most recompute steps of each item.
        layers: recompute steps by item, updated.
        leaves: place of each item's backward.
        at: the present place.
        excess: bytes above the cap.
    """
    item = alive[0][2]
    num_layers = columns.layers[item]
    rung = item * columns.num_rungs + layers[item] // num_layers if num_layers > 0 else 0
    if leaves[item] <= at or layers[item] >= limit[item] or columns.saved[rung] == 0:
        heapq.heappop(alive)
        return 0
    count = min(limit[item] - layers[item], num_layers - layers[item] % num_layers, -(-excess // columns.saved[rung]))
    layers[item] += count
    if layers[item] % num_layers == 0 and layers[item] < limit[item]:
        heapq.heapreplace(alive, (columns.price[rung + 1], -leaves[item], item))
    return count * columns.saved[rung]


@compiled
def trim(
    actions: Integers, begin: int, stop: int, columns: Columns, layers: Integers, cap: int, static: int, places: Integers
) -> None:
    """Undo recompute that the cap does not need after all, dearest first.

    Args:
        actions: of all ranks (`Codes.actions`).
        begin, stop: the part of one rank.
        columns: sizes by item.
        layers: recompute steps by item, updated.
        cap: bytes of the rank.
        static: bytes that the rank holds throughout.
        places: the rank's items, dearest first.
    """
    for place in range(len(places)):
        item = places[place]
        while layers[item] > 0:
            layers[item] -= 1
            if peak(actions, begin, stop, columns, layers, static) > cap:
                layers[item] += 1
                break
