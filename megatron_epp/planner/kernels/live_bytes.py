"""Live bytes along a rank's list of actions, and the recompute that keeps them under a cap."""

from __future__ import annotations

import heapq

from megatron_epp.planner.kernels.codes import ADDED, BACKWARD, FORWARD, KIND_BITS, KIND_MASK, WEIGHT
from megatron_epp.planner.kernels.compiled import IntegerList, compiled, compiled_with_lists, inlined
from megatron_epp.planner.kernels.pass_table import PassTable


@compiled
def peak(actions: IntegerList, begin: int, stop: int, columns: PassTable, recompute_steps: IntegerList, static: int) -> int:
    """Compute the most bytes live at one time while a rank runs ``actions[begin:stop]``."""
    live = most = static
    for at in range(begin, stop):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        if op == FORWARD:
            live += columns.kept_bytes[columns.first_way[item] + recompute_steps[item]] + columns.forward_alloc[item]
            most = max(most, live)
            live -= columns.forward_free[item]
        elif op == BACKWARD:
            way = columns.first_way[item] + recompute_steps[item]
            live -= columns.kept_bytes[way]
            most = max(most, live + columns.whole[way])
            live += columns.backward_residual[item]
        elif op >= ADDED:
            added = (op - ADDED) * columns.num_items + item
            live += columns.added_takes[added]
            most = max(most, live)
            live -= columns.added_gives[added]
    return most


@compiled
def step_bytes(
    actions: IntegerList,
    columns: PassTable,
    recompute_steps: IntegerList,
    split: IntegerList,
    takes: IntegerList,
    gives: IntegerList,
) -> None:
    """Compute the bytes that each action allocates when it starts and frees when it ends.

    By item, `split` is nonzero if its weight gradient is an action of its own, for which its backward leaves bytes.
    """
    for at in range(len(actions)):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        if op >= ADDED:
            added = (op - ADDED) * columns.num_items + item
            takes[at], gives[at] = columns.added_takes[added], columns.added_gives[added]
            continue
        way = columns.first_way[item] + recompute_steps[item]
        stays = columns.kept_bytes[way]
        if op == FORWARD:
            takes[at] = stays + columns.forward_alloc[item]
            gives[at] = columns.forward_free[item]
        elif op == BACKWARD:
            held = columns.weight_bytes[item] if split[item] else 0
            takes[at] = (columns.split[way] if split[item] else columns.whole[way]) - stays
            gives[at] = takes[at] + stays - columns.backward_residual[item] - held
        else:
            takes[at] = 0
            gives[at] = columns.weight_bytes[item]


@compiled_with_lists
def fit_rank(
    actions: IntegerList,
    begin: int,
    stop: int,
    columns: PassTable,
    limit: IntegerList,
    caps: IntegerList,
    static: int,
    recompute_steps: IntegerList,
    leaves: IntegerList,
    by_stay: int,
) -> bool:
    """Walk along a rank's list and, wherever it is above the cap, recompute more of the chunks that are alive.

    Recompute steps are taken at the lowest price, time per byte saved, first, and among equals on the chunk that stays longest;
    or with `by_stay` at the lowest price per action of stay first, which takes less recompute where memory is short all along.
    More recompute of a chunk adds no bytes to earlier actions, so one walk finds a solution where there is one within the
    limits.

    The result is in `recompute_steps`, by item, in which items of other ranks are left alone; `leaves` is working storage, a
    number per item. Returns True if the rank stays under its cap.
    """
    for at in range(begin, stop):
        if actions[at] & KIND_MASK < ADDED:
            item = actions[at] >> KIND_BITS
            recompute_steps[item] = 0
            leaves[item] = at
    alive = [(0.0, 0, 0, 1)]  # cheapest first; what has left or has nothing left to give is dropped when it comes up
    alive.pop()
    live = static
    for at in range(begin, stop):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        if op == WEIGHT:
            continue
        held = change = 0  # bytes while the action runs, and what it leaves behind
        first = 0 if op >= ADDED else columns.first_way[item]
        if op == FORWARD:
            live += columns.kept_bytes[first] + columns.forward_alloc[item]
            if columns.kept_bytes[first] > columns.kept_bytes[first + min(limit[item], columns.num_layers[item])]:
                stay = leaves[item] - at if by_stay else 1
                heapq.heappush(alive, (columns.price[first] / stay, -leaves[item], item, stay))
            change = -columns.forward_free[item]
        elif op == BACKWARD:
            live -= columns.kept_bytes[first + recompute_steps[item]]
            held = columns.whole[first + recompute_steps[item]]
            change = columns.backward_residual[item]
        else:
            added = (op - ADDED) * columns.num_items + item
            live += columns.added_takes[added]
            change = -columns.added_gives[added]
        while live + held > caps[at] and len(alive) > 0:
            is_own = op == BACKWARD and alive[0][2] == item and recompute_steps[item] < limit[item]
            if is_own and columns.whole[first + limit[item]] < held:
                recompute_steps[item] += 1
                held = columns.whole[first + recompute_steps[item]]
                continue
            live -= give_cheapest(alive, columns, limit, recompute_steps, leaves, at, live + held - caps[at])
        if live + held > caps[at]:
            return False
        live += change
    return True


@compiled
def fit(
    actions: IntegerList,
    starts: IntegerList,
    columns: PassTable,
    caps: IntegerList,
    caps_at: IntegerList,
    recompute_steps: IntegerList,
    leaves: IntegerList,
    by_stay: int,
) -> bool:
    """Have ranks above their caps recompute as much as `fit_rank` finds, from zero `recompute_steps`; True if all fit."""
    for rank in range(len(starts) - 1):
        begin, stop, static = starts[rank], starts[rank + 1], columns.static[rank]
        if peak(actions, begin, stop, columns, recompute_steps, static) <= caps[rank]:
            continue
        if not fit_rank(actions, begin, stop, columns, columns.most, caps_at, static, recompute_steps, leaves, by_stay):
            return False
    return True


@compiled_with_lists
def give_cheapest(
    alive: list[tuple[float, int, int, int]],
    columns: PassTable,
    limit: IntegerList,
    recompute_steps: IntegerList,
    leaves: IntegerList,
    at: int,
    excess: int,
) -> int:
    """Take recompute steps on the cheapest chunk that is alive, as many as the excess asks for; return the bytes saved.

    A chunk that has left, or is at its limit, is dropped. A chunk whose layers have all reached a mode gets the price of the
    next. `alive` is a heap of ``(price / stay, -position where it leaves, item, stay)``; stays are 1 where they do not count.
    `leaves` has the positions of the backwards.
    """
    item = alive[0][2]
    taken, first, num_layers = recompute_steps[item], columns.first_way[item], columns.num_layers[item]
    kept_bytes, most = columns.kept_bytes[first + taken], taken
    if leaves[item] > at and taken < limit[item]:  # until all layers have taken the step, of which some may save nothing
        most = min(limit[item], taken - taken % num_layers + num_layers)
    if kept_bytes == columns.kept_bytes[first + most]:
        heapq.heappop(alive)
        return 0
    while taken < most and kept_bytes - columns.kept_bytes[first + taken] < excess:
        taken += 1
    recompute_steps[item] = taken
    if taken % num_layers == 0 and taken < limit[item]:
        stay = alive[0][3]
        heapq.heapreplace(alive, (columns.price[first + taken] / stay, -leaves[item], item, stay))
    return kept_bytes - columns.kept_bytes[first + taken]


@compiled
def trim(
    actions: IntegerList,
    begin: int,
    stop: int,
    columns: PassTable,
    recompute_steps: IntegerList,
    cap: int,
    static: int,
    dearest: IntegerList,
) -> None:
    """Undo recompute that the cap does not need after all, dearest first."""
    for position in range(len(dearest)):
        item = dearest[position]
        while recompute_steps[item] > 0:
            recompute_steps[item] -= 1
            if peak(actions, begin, stop, columns, recompute_steps, static) > cap:
                recompute_steps[item] += 1
                break


@inlined
def leaves_bytes(columns: PassTable, item: int) -> bool:
    """Return True if a backward leaves bytes for its weight gradient, or its chunk keeps none: on a stage without layers."""
    return columns.weight_bytes[item] > 0 or columns.kept_bytes[columns.first_way[item]] + columns.forward_alloc[item] == 0
