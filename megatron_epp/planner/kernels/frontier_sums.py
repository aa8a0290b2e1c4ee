"""Sums over recompute steps (see `planner.memory.frontier`)."""

from __future__ import annotations

from collections.abc import MutableSequence

from megatron_epp.planner.kernels.compiled import compiled


@compiled
def frontier_sum[N: (int, float)](values: MutableSequence[N], first: int, num_layers: int, num_steps: int) -> N:
    """Sum the values of the first recompute steps; each mode has as many steps as the stage has layers.

    Args:
        values: value of one step, by mode.
        first: index of the item's first mode in `values`.
        num_layers: layers of the stage.
        num_steps: number of steps.
    """
    at, left = first, num_steps
    total = values[first] * 0
    while left > num_layers:
        total += num_layers * values[at]
        left -= num_layers
        at += 1
    return total + left * values[at]
