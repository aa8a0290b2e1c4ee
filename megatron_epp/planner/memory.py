"""Recompute under memory caps: how many layers of each stage and chunk run their forward again in backward.

Memory of a rank depends on the order of its actions alone, not on their times, so it is counted along its list, with the same
bytes the plan's steps carry.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from megatron_epp.planner.evaluate import Layers
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
    """Keep every rank under its cap with as little recompute time as the greedy rule of `_sweep` finds.

    When the caps can be met at all, they are: the search for the least peak is exact.
    """
    chunks = len(tables.message_us)
    fixed = options.recompute if tables.backward_us else 0
    if fixed != "auto":
        layers = [[min(fixed, count)] * chunks for count in tables.num_layers]
        peaks = [peak_bytes(actions, tables, rank, layers[rank]) for rank, actions in enumerate(order)]
        return Fit(layers) if all(peak <= cap for peak, cap in zip(peaks, caps, strict=True)) else Fit(None, max(peaks))
    layers = []
    for rank, actions in enumerate(order):
        row: list[int] | None = [0] * chunks
        if peak_bytes(actions, tables, rank, [0] * chunks) > caps[rank]:
            row = _sweep(actions, tables, rank, caps[rank])
        if row is None:
            return Fit(None, max(least_peak(other, tables, number) for number, other in enumerate(order)))
        layers.append(row)
    return Fit(layers)


def least_peak(actions: tuple[Action, ...], tables: Tables, rank: int) -> int:
    """The least peak that any choice of recompute gives a rank: that of recomputing all.

    A recomputed layer keeps less from forward to backward, and its backward never holds more than a plain layer's, which has
    the same activations at hand.
    """
    return peak_bytes(actions, tables, rank, [tables.num_layers[rank] if saved > 0 else 0 for saved in tables.saved[rank]])


def peak_bytes(actions: tuple[Action, ...], tables: Tables, rank: int, layers: list[int]) -> int:
    """Most bytes live at one time on a rank."""
    kept = [tables.kept_bytes(rank, c, count) for c, count in enumerate(layers)]
    rise = [tables.rise_bytes(rank, c, count) for c, count in enumerate(layers)]
    forward_alloc, forward_free = tables.forward_alloc[rank], tables.forward_free[rank]
    backward_free = tables.backward_free[rank]
    forward = Op.F
    live = peak = tables.static[rank]
    for op, _, c in actions:
        if op is forward:
            live += kept[c] + forward_alloc[c]
            peak = max(peak, live)
            live -= forward_free[c]
        else:
            peak = max(peak, live + rise[c])
            live -= kept[c] + backward_free[c]
    return peak


def _sweep(actions: tuple[Action, ...], tables: Tables, rank: int, cap: int) -> list[int] | None:
    """Walk along the rank's list; wherever it is above the cap, recompute more of what is alive.

    What is alive gives up layers in the order of bytes saved per time of recompute, and among equals what stays longest. The
    chunk whose backward is at hand comes last, and gives no more than it takes: nothing of it stays. Raising the recompute of
    a chunk takes nothing from the past, so one walk is enough.

    Returns:
        Recomputed layers per chunk, or None when the walk meets a peak it cannot lower.
    """
    saved, most, layer_us = tables.saved[rank], tables.num_layers[rank], tables.layer_us[rank]
    leaves = {c: position for position, (op, _, c) in enumerate(actions) if op is Op.B}
    layers = [0] * len(saved)
    alive: list[tuple[float, int, int]] = []  # cheapest first; what has left is dropped when it comes up
    gone = [False] * len(saved)
    live = tables.static[rank]

    def shed(excess: int, but: int = -1) -> int:
        """Lower `live` by at least `excess` if possible; returns what is still missing."""
        nonlocal live
        spared = None
        while excess > 0 and alive:
            c = alive[0][2]
            if gone[c] or layers[c] == most:
                heapq.heappop(alive)
            elif c == but:
                spared = heapq.heappop(alive)
            else:
                count = min(most - layers[c], -(-excess // saved[c]))
                layers[c] += count
                live -= count * saved[c]
                excess -= count * saved[c]
        if spared is not None:
            heapq.heappush(alive, spared)
        return excess

    for op, _, c in actions:
        if op is Op.F:
            live += tables.kept_bytes(rank, c, 0) + tables.forward_alloc[rank][c]
            if saved[c] > 0:
                heapq.heappush(alive, (layer_us[c] / saved[c], -leaves[c], c))
            if shed(live - cap) > 0:
                return None
        else:
            missing = shed(live + tables.rise_bytes(rank, c, layers[c]) - cap, but=c)
            while missing > 0 and saved[c] > 0 and layers[c] < most:
                layers[c] += 1
                live -= saved[c]
                missing = live + tables.rise_bytes(rank, c, layers[c]) - cap
            if missing > 0:
                return None
            live -= tables.kept_bytes(rank, c, layers[c]) + tables.backward_free[rank][c]
            gone[c] = True
    return layers
