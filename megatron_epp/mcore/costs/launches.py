"""Measured time in which the host launches the passes of a rank's own stage, which the device cannot be ahead of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_epp.cost import Line, StageCosts
from megatron_epp.cost.fit import Point
from megatron_epp.mcore.costs.probe import Case, backward, enter, run_weights
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.runtime.tools.profiling import Timer

_REPEATS = 8
_LEAST_POINTS = 4
"""Least number of points for a line of three coefficients."""
_BOUND = 1.1
"""Ratio of a time to that of launching below which the host bounds the pass, so that it says nothing of the device."""


class Launches(NamedTuple):
    """Time of launching a whole stage's passes, in microseconds; the backward has the weight gradients, also if they are split.

    All are 0 where the host computes.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0


def measure_launches(stage: MegatronStage, case: Case, timer: Timer) -> Launches:
    """Measure how long the host takes to launch each pass, with an idle device ahead of it.

    Args:
        stage: the stage.
        case: to run; with few tokens, since some layers wait for the device.
        timer: the clock of the stage's device.
    """
    if not timer.runs_ahead:
        return Launches()
    found = [_launched(stage, case, timer) for _ in range(_REPEATS + 1)][1:]
    return Launches(*map(statistics.median, zip(*found, strict=True)))


def _launched(stage: MegatronStage, case: Case, timer: Timer) -> Launches:
    context, hidden = enter(stage, case.chunk(0))
    start_us = timer.now_us()
    output = stage.forward(context, hidden)
    forward_us = timer.host_us() - start_us
    start_us = timer.now_us()
    backward(stage, output, context, keep_weights=stage.weights is not None)
    backward_us, weight_us = timer.host_us() - start_us, 0.0
    if stage.weights is not None:
        start_us = timer.now_us()
        for _ in run_weights(stage):
            weight_us = timer.host_us() - start_us
    return Launches(forward_us, backward_us + weight_us, weight_us)


def of_device(points: Sequence[Point], launch_us: float) -> Sequence[Point]:
    """Return the points that the device bounds; all if they are too few for a line.

    Args:
        points: measured times of a pass.
        launch_us: time of launching it.
    """
    found = [point for point in points if point.time_us > _BOUND * launch_us]
    return found if len(found) >= _LEAST_POINTS else points


def with_launches(costs: StageCosts, launches: Launches, formula: StageCosts) -> StageCosts:
    """Set the times of launching of a stage, which are all counted with its layers; of recompute modes by their share.

    Args:
        costs: of the stage.
        launches: as measured; zero where the host computes.
        formula: costs by formula, which know the shares of recompute modes.
    """
    of_layer = [launch_us / max(1, costs.num_halves / 2) for launch_us in launches]
    forward_us, backward_us, weight_us = of_layer
    share = {
        name: mode.again.launch_us / formula.forward.launch_us if formula.forward.launch_us else 1.0
        for name, mode in formula.recompute.items()
    }

    def set_all(lines: Iterable[Line], times_us: Iterable[float]) -> list[Line]:
        return [replace(line, launch_us=time_us) for line, time_us in zip(lines, times_us, strict=True)]

    half, has_half = costs.half, costs.num_halves % 2
    forward, backward, weight = set_all((costs.forward, costs.backward, costs.weight), of_layer)
    half_forward, half_backward, half_weight = set_all(
        (half.forward, half.backward, half.weight), (has_half * one / 2 for one in (forward_us, backward_us, weight_us))
    )
    none = (0.0, 0.0, 0.0) if costs.num_halves else launches
    extra_forward, extra_backward, extra_weight = set_all((costs.extra_forward, costs.extra_backward, costs.extra_weight), none)
    return replace(
        costs,
        forward=forward,
        backward=backward,
        weight=weight,
        half=replace(half, forward=half_forward, backward=half_backward, weight=half_weight),
        extra_forward=extra_forward,
        extra_backward=extra_backward,
        extra_weight=extra_weight,
        recompute={
            name: replace(mode, again=replace(mode.again, launch_us=share.get(name, 1.0) * forward_us))
            for name, mode in costs.recompute.items()
        },
    )
