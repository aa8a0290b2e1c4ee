"""What is live along a rank's list, and the recompute that keeps it under a cap."""

from __future__ import annotations

import heapq

from megatron_epp.planner.kernels.climb import climbed
from megatron_epp.planner.kernels.columns import BACKWARD, FORWARD, Columns
from megatron_epp.planner.kernels.compiled import Integers, compiled


@compiled
def kept(columns: Columns, item: int, taken: int) -> int:
    """Activations from forward to backward after so many steps on the ladder of recompute."""
    return columns.activation[item] - climbed(columns.saved, item * columns.num_rungs, columns.layers[item], taken)


@compiled
def risen(columns: Columns, item: int, taken: int, apart: bool) -> int:
    """The most that a chunk's backward holds above what is live when it starts, after so many steps on the ladder.

    A backward goes through the stage from its end. What the head kept goes first. At each layer there is more for a while: what
    recompute makes again, or the gradient of its keys and values, of which the latter stays. Then what the layer kept goes, and
    with a sequence's first slice its keys and values and their gradient.

    The layers with fewest steps come first. Of layers with as many steps all are alike, so the most is held at the first or at
    the last of them; and as those that come later keep less, the last of the former is never the one.

    Args:
        apart: it keeps what weight gradients need, of the head and of every layer that it has passed.
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
    """The most that a backward and its chunk's activations hold together, where it computes weight gradients itself.

    It never grows with the steps taken, but where those layers that climb are fuller while their own backward runs.
    """
    return max(kept(columns, item, taken) + risen(columns, item, taken, False), columns.net[item])


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
def levels(actions: Integers, columns: Columns, layers: Integers, split: Integers, takes: Integers, gives: Integers) -> None:
    """What each action takes when it starts and gives back when it ends.

    Args:
        layers: by item, of all stages.
        split: by item, whether its weight gradient is an action of its own, for which its backward leaves something.
        takes, gives: by place, where the answer goes.
    """
    for at in range(len(actions)):
        item, op = actions[at] // 3, actions[at] % 3
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
    """Walk along a rank's list; wherever it is above the cap there, recompute more of what is alive.

    What is alive climbs its ladder in the order of bytes saved per time of recompute, and among equals what stays longest.
    Raising the recompute of a chunk takes nothing from the past, so one walk is enough, and it finds a way wherever there is
    one within the limits.

    Args:
        limit: most steps that each item may take on its ladder.
        caps: by place among the actions.
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
            if columns.saved[item * columns.num_rungs] > 0 and limit[item] > 0:
                heapq.heappush(alive, (columns.price[item * columns.num_rungs], -leaves[item], item))
            while live > caps[at] and len(alive) > 0:
                live -= give_cheapest(alive, columns, limit, layers, leaves, at, live - caps[at])
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
    return True


@compiled
def fit(
    actions: Integers, starts: Integers, columns: Columns, caps: Integers, caps_at: Integers, layers: Integers, leaves: Integers
) -> bool:
    """Have every rank that is above its cap recompute as much as `sweep` finds; whether all stay under theirs.

    Args:
        caps: of every rank; caps_at: the same by place among the actions.
        layers: zeros by item, where the answer goes.
        leaves: room for a number per item.
    """
    for rank in range(len(starts) - 1):
        begin, stop, static = starts[rank], starts[rank + 1], columns.static[rank]
        if peak(actions, begin, stop, columns, layers, static) <= caps[rank]:
            continue
        if not sweep(actions, begin, stop, columns, columns.most, caps_at, static, layers, leaves):
            return False
    return True


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
    """Have the cheapest of what is alive take more steps on its rung, as many as the excess asks for; the bytes that saves.

    What has left, or has come to its limit, is dropped. What has come to the end of its rung gets the price of the next.
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
