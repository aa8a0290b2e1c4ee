"""Sums along a ladder of recompute (see `planner.memory.ladder`)."""

from __future__ import annotations

from collections.abc import MutableSequence

from megatron_epp.planner.kernels.compiled import compiled


@compiled
def climbed[N: (int, float)](values: MutableSequence[N], first: int, layers: int, taken: int) -> N:
    """What the first steps on a ladder come to together: of each rung as many as the stage has layers.

    Args:
        values: of one step, by rung.
        first: where the first rung stands.
        layers: of the stage.
        taken: steps.
    """
    at, left = first, taken
    total = values[first] * 0
    while left > layers:
        total += layers * values[at]
        left -= layers
        at += 1
    return total + left * values[at]
