"""Recompute under memory caps: how many layers of each stage and chunk run their forward again in backward.

Memory of a rank depends on the order of its actions alone, not on their times, so it is counted along its list, with the same
bytes the plan's steps carry.
"""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

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
            row = _sweep(actions, tables, rank, caps[rank], frozenset())
        if row is None:
            least, plain = least_peak(actions, tables, rank)
            if least > caps[rank]:
                return Fit(None, max(least_peak(other, tables, number)[0] for number, other in enumerate(order)))
            row = _sweep(actions, tables, rank, caps[rank], plain)
        assert row is not None  # with `plain` chunks left alone, full recompute of the rest is the least peak
        layers.append(row)
    return Fit(layers)


def peak_bytes(actions: tuple[Action, ...], tables: Tables, rank: int, layers: list[int]) -> int:
    """Most bytes live at one time on a rank."""
    activation, saved, workspace = tables.activation[rank], tables.saved[rank], tables.workspace[rank]
    forward_alloc, forward_free = tables.forward_alloc[rank], tables.forward_free[rank]
    backward_alloc, backward_free = tables.backward_alloc[rank], tables.backward_free[rank]
    forward = Op.F
    live = peak = tables.static[rank]
    for op, _, c in actions:
        if op is forward:
            live += activation[c] - layers[c] * saved[c] + forward_alloc[c]
            peak = max(peak, live)
            live -= forward_free[c]
        else:
            live += backward_alloc[c]
            peak = max(peak, live + workspace[c] if layers[c] else live)
            live -= activation[c] - layers[c] * saved[c] + backward_free[c]
    return peak


def _sweep(actions: tuple[Action, ...], tables: Tables, rank: int, cap: int, plain: AbstractSet[int]) -> list[int] | None:
    """Walk along the rank's list; wherever it is above the cap, recompute more of what is alive.

    What is alive gives up layers in the order of bytes saved per time of recompute, and among equals what stays longest.
    Raising the recompute of a chunk takes nothing from the past, so one walk is enough.

    Args:
        plain: chunks that must not recompute, because the workspace of their backward would not fit.

    Returns:
        Recomputed layers per chunk, or None when the walk meets a peak it cannot lower.
    """
    activation, saved, workspace = tables.activation[rank], tables.saved[rank], tables.workspace[rank]
    most, layer_us = tables.num_layers[rank], tables.layer_us[rank]
    leaves = {c: position for position, (op, _, c) in enumerate(actions) if op is Op.B}
    layers = [0] * len(activation)
    alive: list[tuple[float, int, int]] = []  # cheapest first; what has left is dropped when it comes up
    gone = [False] * len(activation)
    live = tables.static[rank]

    def shed(excess: int, but: int = -1) -> int:
        """Lower `live` by at least `excess` if possible; returns what is still missing."""
        nonlocal live
        kept = None
        while excess > 0 and alive:
            c = alive[0][2]
            if gone[c] or layers[c] == most:
                heapq.heappop(alive)
            elif c == but:
                kept = heapq.heappop(alive)
            else:
                count = min(most - layers[c], -(-excess // saved[c]))
                layers[c] += count
                live -= count * saved[c]
                excess -= count * saved[c]
        if kept is not None:
            heapq.heappush(alive, kept)
        return excess

    for op, _, c in actions:
        if op is Op.F:
            live += activation[c] + tables.forward_alloc[rank][c]
            if saved[c] > 0 and c not in plain:
                heapq.heappush(alive, (layer_us[c] / saved[c], -leaves[c], c))
            if shed(live - cap) > 0:
                return None
        else:
            live += tables.backward_alloc[rank][c]
            if layers[c]:
                missing = shed(live + workspace[c] - cap)
            elif (missing := shed(live - cap, but=c)) > 0 and c not in plain:
                layers[c] = most  # the last resort: all of its own, which pays for the workspace or does not
                live -= most * saved[c]
                missing = live + workspace[c] - cap
            if missing > 0:
                return None
            live -= activation[c] - layers[c] * saved[c] + tables.backward_free[rank][c]
            gone[c] = True
    return layers


def least_peak(actions: tuple[Action, ...], tables: Tables, rank: int) -> tuple[int, frozenset[int]]:
    """The least peak that any choice of recompute gives a rank, and the chunks that do not recompute then.

    Between none and all of a chunk's layers, all is never worse: both need the workspace. So start with all layers of all
    chunks. If the peak lies in the backward of a chunk whose workspace outweighs what its recompute saves, any choice with a
    lower peak leaves that chunk plain; make it so and look again. If it lies elsewhere, no choice is lower.
    """
    activation, saved, workspace = tables.activation[rank], tables.saved[rank], tables.workspace[rank]
    most = tables.num_layers[rank]
    level = np.zeros(len(actions) + 1, dtype=np.int64)
    starts: dict[int, int] = {}
    after = tables.static[rank]
    full = [most > 0 and size > 0 for size in saved]
    for position, (op, _, c) in enumerate(actions):
        kept = activation[c] - (most * saved[c] if full[c] else 0)
        if op is Op.F:
            starts[c] = position
            after += kept + tables.forward_alloc[rank][c]
            level[position] = after
            after -= tables.forward_free[rank][c]
        else:
            after += tables.backward_alloc[rank][c]
            level[position] = after + (workspace[c] if full[c] else 0)
            after -= kept + tables.backward_free[rank][c]
    level[-1] = tables.static[rank]
    best = int(level.max())
    plain = {c for c, recomputes in enumerate(full) if not recomputes}
    best_plain = frozenset(plain)
    while (position := int(level.argmax())) < len(actions):
        op, _, c = actions[position]
        if op is Op.F or c in plain or most * saved[c] >= workspace[c]:
            break
        plain.add(c)
        level[starts[c] : position + 1] += most * saved[c]
        level[position] -= workspace[c]
        if (peak := int(level.max())) < best:
            best, best_plain = peak, frozenset(plain)
    return best, best_plain
