"""Recompute under memory caps: how many layers of each stage and chunk run their forward again in backward.

Memory of a rank depends on the order of its actions alone, not on their times, so it is counted along its list, with the same
bytes the plan's steps carry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.evaluate import Layers
from megatron_epp.planner.ledger import Ledger
from megatron_epp.planner.order import Order
from megatron_epp.planner.problem import Options
from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Op


@dataclass(frozen=True, slots=True)
class Fit:
    """What recompute it takes to stay under the caps; or, where `layers` is None, the smallest cap that would do.

    Attributes:
        layers: recomputed layers ``[stage][chunk]``, or None where nothing fits.
        needed_bytes: the least peak of the rank that needs most. Zero where it fits.
    """

    layers: Layers | None
    needed_bytes: int = 0


def fit_recompute(order: Order, tables: Tables, caps: tuple[int, ...], options: Options) -> Fit:
    """Keep every rank under its cap with as little recompute time as the greedy rule of `sweep` finds.

    When the caps can be met at all, they are: the search for the least peak is exact.
    """
    chunks = len(tables.message_us)
    fixed = options.recompute if tables.backward_us else 0
    ranks = range(len(order))
    if fixed != "auto":
        layers = [[min(fixed, count)] * chunks for count in tables.num_layers]
        rows = [[count for stage in tables.stages_of[rank] for count in layers[stage]] for rank in ranks]
        peaks = [peak_bytes(order[rank], tables, rank, rows[rank]) for rank in ranks]
        return Fit(layers) if all(peak <= cap for peak, cap in zip(peaks, caps, strict=True)) else Fit(None, max(peaks))
    layers = [[0] * chunks for _ in tables.rank_of]
    for rank in ranks:
        row = fit_rank(order[rank], tables, rank, caps[rank])
        if row is None:
            return Fit(None, max(least_peak(order[other], tables, other)[0] for other in ranks))
        for at, stage in enumerate(tables.stages_of[rank]):
            layers[stage] = row[at * chunks : (at + 1) * chunks]
    return Fit(layers)


def fit_rank(
    actions: tuple[Action, ...], tables: Tables, rank: int, cap: int, plain: AbstractSet[int] = frozenset()
) -> list[int] | None:
    """Recomputed layers of every item of a rank that keep it under its cap, or None where nothing does.

    Args:
        plain: items that are left alone if possible.
    """
    ledger = Ledger.of(tables, rank)
    row: list[int] | None = [0] * len(ledger.most)
    if peak_bytes(actions, tables, rank, [0] * len(ledger.most)) <= cap:
        return row
    row = sweep(actions, ledger, cap, plain)
    if row is None:
        least, plain = least_peak(actions, tables, rank)
        if least > cap:
            return None
        row = sweep(actions, ledger, cap, plain)
        assert row is not None  # with `plain` chunks left alone, full recompute of the rest is the least peak
    return row


def peak_bytes(actions: tuple[Action, ...], tables: Tables, rank: int, layers: list[int]) -> int:
    """Most bytes live at one time on a rank, `layers` by item (by chunk where the rank has one stage)."""
    ledger = Ledger.of(tables, rank)
    activation, saved, workspace, number = ledger.activation, ledger.saved, ledger.workspace, ledger.number
    forward_alloc, forward_free = ledger.forward_alloc, ledger.forward_free
    backward_alloc, backward_free = ledger.backward_alloc, ledger.backward_free
    forward = Op.F
    live = peak = ledger.static
    for op, stage, c in actions:
        item = number[stage] + c
        if op is forward:
            live += activation[item] - layers[item] * saved[item] + forward_alloc[item]
            if live > peak:
                peak = live
            live -= forward_free[item]
        else:
            live += backward_alloc[item]
            top = live + workspace[item] if layers[item] else live
            if top > peak:
                peak = top
            live -= activation[item] - layers[item] * saved[item] + backward_free[item]
    return peak


def sweep(
    actions: tuple[Action, ...], ledger: Ledger, cap: int, plain: AbstractSet[int], away: Sequence[int] = ()
) -> list[int] | None:
    """Walk along the rank's list; wherever it is above the cap, recompute more of what is alive.

    What is alive gives up layers in the order of bytes saved per time of recompute, and among equals what stays longest.
    Raising the recompute of a chunk takes nothing from the past, so one walk is enough.

    Args:
        plain: items that must not recompute, because the workspace of their backward would not fit or they are copied away.
        away: bytes that are on the host while an action runs, by position; none where empty.

    Returns:
        Recomputed layers per chunk, or None when the walk meets a peak it cannot lower.
    """
    activation, saved, workspace, number = ledger.activation, ledger.saved, ledger.workspace, ledger.number
    most, layer_us = ledger.most, ledger.layer_us
    leaves = {number[stage] + c: position for position, (op, stage, c) in enumerate(actions) if op is Op.B}
    layers = [0] * len(activation)
    alive: list[tuple[float, int, int]] = []  # cheapest first; what has left is dropped when it comes up
    gone = [False] * len(activation)
    live = ledger.static

    def shed(excess: int, but: int = -1) -> int:
        """Lower `live` by at least `excess` if possible; returns what is still missing."""
        nonlocal live
        kept = None
        while excess > 0 and alive:
            c = alive[0][2]
            if gone[c] or layers[c] == most[c]:
                heapq.heappop(alive)
            elif c == but:
                kept = heapq.heappop(alive)
            else:
                count = min(most[c] - layers[c], -(-excess // saved[c]))
                layers[c] += count
                live -= count * saved[c]
                excess -= count * saved[c]
        if kept is not None:
            heapq.heappush(alive, kept)
        return excess

    for position, (op, stage, chunk) in enumerate(actions):
        c = number[stage] + chunk
        room = cap + away[position] if away else cap
        if op is Op.F:
            live += activation[c] + ledger.forward_alloc[c]
            if saved[c] > 0 and c not in plain:
                heapq.heappush(alive, (layer_us[c] / saved[c], -leaves[c], c))
            if shed(live - room) > 0:
                return None
        else:
            live += ledger.backward_alloc[c]
            if layers[c]:
                missing = shed(live + workspace[c] - room)
            elif (missing := shed(live - room, but=c)) > 0 and c not in plain:
                layers[c] = most[c]  # the last resort: all of its own, which pays for the workspace or does not
                live -= most[c] * saved[c]
                missing = live + workspace[c] - room
            if missing > 0:
                return None
            live -= activation[c] - layers[c] * saved[c] + ledger.backward_free[c]
            gone[c] = True
    return layers


def least_peak(actions: tuple[Action, ...], tables: Tables, rank: int) -> tuple[int, frozenset[int]]:
    """The least peak that any choice of recompute gives a rank, and the chunks that do not recompute then.

    Between none and all of a chunk's layers, all is never worse: both need the workspace. So start with all layers of all
    chunks. If the peak lies in the backward of a chunk whose workspace outweighs what its recompute saves, any choice with a
    lower peak leaves that chunk plain; make it so and look again. If it lies elsewhere, no choice is lower.
    """
    ledger = Ledger.of(tables, rank)
    activation, workspace, number = ledger.activation, ledger.workspace, ledger.number
    saving = [max(0, most * saved) for most, saved in zip(ledger.most, ledger.saved, strict=True)]
    level = np.zeros(len(actions) + 1, dtype=np.int64)
    starts: dict[int, int] = {}
    after = ledger.static
    full = [size > 0 for size in saving]
    for position, (op, stage, chunk) in enumerate(actions):
        c = number[stage] + chunk
        kept = activation[c] - saving[c]
        if op is Op.F:
            starts[c] = position
            after += kept + ledger.forward_alloc[c]
            level[position] = after
            after -= ledger.forward_free[c]
        else:
            after += ledger.backward_alloc[c]
            level[position] = after + (workspace[c] if full[c] else 0)
            after -= kept + ledger.backward_free[c]
    level[-1] = ledger.static
    best = int(level.max())
    plain = {c for c, recomputes in enumerate(full) if not recomputes}
    best_plain = frozenset(plain)
    while (position := int(level.argmax())) < len(actions):
        op, stage, chunk = actions[position]
        c = number[stage] + chunk
        if op is Op.F or c in plain or saving[c] >= workspace[c]:
            break
        plain.add(c)
        level[starts[c] : position + 1] += saving[c]
        level[position] -= workspace[c]
        if (peak := int(level.max())) < best:
            best, best_plain = peak, frozenset(plain)
    return best, best_plain
