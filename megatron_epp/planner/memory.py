"""Recompute under memory caps: how many layers of each stage and chunk run their forward again in backward.

Memory of a rank depends on the order of its actions alone, not on their times, so it is counted along its list, with the same
bytes the plan's steps carry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

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

    When the caps can be met at all, they are: no choice has a lower peak than recompute of everything (`least_peak`).
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
            return Fit(None, max(least_peak(order[other], tables, other) for other in ranks))
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
    none = [0] * len(ledger.most)
    if peak_bytes(actions, tables, rank, none) <= cap:
        return none
    row = sweep(actions, ledger, cap, plain)
    return row if row is not None or not plain else sweep(actions, ledger, cap)


def peak_bytes(actions: tuple[Action, ...], tables: Tables, rank: int, layers: list[int]) -> int:
    """Most bytes live at one time on a rank, `layers` by item (by chunk where the rank has one stage)."""
    ledger = Ledger.of(tables, rank)
    kept, own = list(map(ledger.kept, range(len(layers)), layers)), list(map(ledger.own, range(len(layers)), layers))
    number, net = ledger.number, ledger.net
    forward_alloc, forward_free = ledger.forward_alloc, ledger.forward_free
    forward = Op.F
    live = peak = ledger.static
    for op, stage, c in actions:
        item = number[stage] + c
        if op is forward:
            live += kept[item] + forward_alloc[item]
            if live > peak:
                peak = live
            live -= forward_free[item]
        else:
            live -= kept[item]
            if live + own[item] > peak:
                peak = live + own[item]
            live += net[item]
    return peak


def least_peak(actions: tuple[Action, ...], tables: Tables, rank: int) -> int:
    """The least peak that any choice of recompute gives a rank: that of all layers of all chunks.

    No action holds more when more layers recompute, neither its own nor another chunk's (see `Ledger.own`).
    """
    return peak_bytes(actions, tables, rank, Ledger.of(tables, rank).most)


def sweep(
    actions: tuple[Action, ...], ledger: Ledger, cap: int, plain: AbstractSet[int] = frozenset(), away: Sequence[int] = ()
) -> list[int] | None:
    """Walk along the rank's list; wherever it is above the cap, recompute more of what is alive.

    What is alive gives up layers in the order of bytes saved per time of recompute, and among equals what stays longest.
    Raising the recompute of a chunk takes nothing from the past, so one walk is enough, and without `plain` it finds a way
    wherever there is one.

    Args:
        plain: items that must not recompute.
        away: bytes that are on the host while an action runs, by position; none where empty.

    Returns:
        Recomputed layers per item, or None when the walk meets a peak it cannot lower.
    """
    walk = _Walk(actions, ledger)
    for position, (op, stage, chunk) in enumerate(actions):
        item = ledger.number[stage] + chunk
        room = cap + away[position] if away else cap
        if op is Op.F:
            walk.enter(item, item not in plain)
            if walk.live > room and not walk.shed(room):
                return None
            walk.live -= ledger.forward_free[item]
        elif not walk.leave(item, room):
            return None
    return walk.layers


class _Walk:
    """What is live on a rank as its list is walked along."""

    def __init__(self, actions: tuple[Action, ...], ledger: Ledger) -> None:
        self.ledger = ledger
        self.leaves = {ledger.number[stage] + c: position for position, (op, stage, c) in enumerate(actions) if op is Op.B}
        self.layers = [0] * len(ledger.most)
        self.alive: list[tuple[float, int, int]] = []  # cheapest first; what has left is dropped when it comes up
        self.gone = [False] * len(ledger.most)
        self.live = ledger.static

    def enter(self, item: int, may_recompute: bool) -> None:
        ledger = self.ledger
        self.live += ledger.activation[item] + ledger.forward_alloc[item]
        if ledger.saved[item] and may_recompute:
            heapq.heappush(self.alive, (ledger.layer_us[item] / ledger.saved[item], -self.leaves.get(item, 0), item))

    def shed(self, room: int) -> bool:
        """Lower what is live to the room there is; False where it cannot be."""
        ledger, layers, alive = self.ledger, self.layers, self.alive
        while self.live > room and alive:
            item = alive[0][2]
            if self.gone[item] or layers[item] == ledger.most[item]:
                heapq.heappop(alive)
                continue
            count = min(ledger.most[item] - layers[item], -(-(self.live - room) // ledger.saved[item]))
            layers[item] += count
            self.live -= count * ledger.saved[item]
        return self.live <= room

    def leave(self, item: int, room: int) -> bool:
        """Run an item's backward within the room there is; False where it cannot be."""
        ledger, layers, alive = self.ledger, self.layers, self.alive
        others = self.live - ledger.kept(item, layers[item])
        own = ledger.own(item, layers[item])
        while others + own > room and alive:
            other = alive[0][2]
            if self.gone[other] or layers[other] == ledger.most[other]:
                heapq.heappop(alive)
            elif other != item:
                count = min(ledger.most[other] - layers[other], -(-(others + own - room) // ledger.saved[other]))
                layers[other] += count
                others -= count * ledger.saved[other]
            elif (less := ledger.own(item, layers[item] + 1)) < own:
                layers[item] += 1
                own = less
            else:  # its own recompute helps its backward no further
                heapq.heappop(alive)
        self.live = others + ledger.net[item]
        self.gone[item] = True
        return others + own <= room
