"""Sums over recompute steps (see `planner.memory.ladder`)."""

from __future__ import annotations

from collections.abc import MutableSequence

from megatron_epp.planner.kernels.compiled import compiled


@compiled
def climbed[N: (int, float)](values: MutableSequence[N], first: int, layers: int, taken: int) -> N:
    """Sum the values of the first recompute steps; each level has as many steps as the stage has layers.

    Args:
        values: value of one step, by level.
        first: index of the item's first level in `values`.
        layers: layers of the stage.
        taken: number of steps.
    """
    at, left = first, taken
    total = values[first] * 0
    while left > layers:
        total += layers * values[at]
        left -= layers
        at += 1
    return total + left * values[at]
