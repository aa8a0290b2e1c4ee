"""Measured times of whole, packed and sliced chunks on a rank's own stage, fitted to the lines of the cost model."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost import Line, StageCosts
from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.cost.learning import shared
from megatron_epp.mcore.costs.launches import measure_launches, of_device, with_launches
from megatron_epp.mcore.costs.probe import (
    LONGEST_CONTEXT,
    MULTIPLE,
    Case,
    backward,
    cases_of,
    enter,
    forward,
    run_weights,
    watched,
)
from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Recompute, Segment
from megatron_epp.plan.recompute import MODES
from megatron_epp.runtime.attention.layout import SliceView
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.tools.profiling import Timer

_REPEATS = 8
_MODE_REPEATS = 3
_ALIVE = 4
"""Number of cases that are between their forward and their backward at a time."""
_GPU_FACTOR = 2
"""Factor on token counts on a GPU, where small kernels take as long as larger ones."""
_GPU_LONGEST_CONTEXT = 131072


def measure_times(stage: MegatronStage, costs: StageCosts, context: int) -> StageCosts:
    """Fit the stage's lines to times of whole, packed and sliced sequences; time outside the layers goes to the stage's extras.

    A kernel's time is not exactly linear in tokens and pairs, so the measured cases resemble real batches: slices at several
    positions of a sequence of the context length (in tokens). The recompute time of a mode is the time by which its backward
    takes longer; a layer that recomputes in full runs its forward again. `costs` must have the bytes per token.
    """
    cases = cases_of(context, multiple_of(stage), *_limits(costs))
    times = _medians(stage, cases)
    launches = measure_launches(stage, min(cases, key=lambda case: (case.prefix, case.tokens, case.segments)), _timer(stage))
    formula = costs

    def fit(times_us: Iterable[float], pairs: bool, launch_us: float = 0.0) -> Line:
        points = [Point(c.tokens, c.pairs, max(0.0, us)) for c, us in zip(cases, times_us, strict=True)]
        return fit_line(of_device(points, launch_us), pairs).line

    layers = max(1, stage.num_layers)

    def again(mode: str) -> Line:
        found = _medians(stage, cases, Recompute(**{mode: stage.num_layers}), _MODE_REPEATS)
        longer = (after.layers_backward - t.layers_backward for after, t in zip(found, times, strict=True))
        return fit(longer, MODES[mode].repeats_attention).scaled(1 / layers)

    def divided(whole: Line, layer: Line, half: Line) -> tuple[Line, Line]:
        """Divide a line of all layers between each of them and the half that the stage has besides them."""
        if not stage.num_halves % 2:
            return whole.scaled(1 / layers), Line()
        return shared(whole, layer, stage.num_layers, half, Line())[:2]

    forward, half_forward = divided(
        fit((t.layers_forward for t in times), True, launches.forward), costs.forward, costs.half.forward
    )
    backward, half_backward = divided(
        fit((t.layers_backward for t in times), True, launches.backward), costs.backward, costs.half.backward
    )
    extra_backward = fit((t.backward - t.layers_backward for t in times), False)
    if stage.weights is not None:
        weight, half_weight = divided(fit((t.layers_weight for t in times), False), costs.weight, costs.half.weight)
        costs = replace(
            costs,
            weight=weight.within(backward),
            half=replace(costs.half, weight=half_weight.within(half_backward)),
            extra_weight=fit((t.weight - t.layers_weight for t in times), False).within(extra_backward),
        )
    measured = replace(
        costs,
        forward=forward,
        backward=backward,
        half=replace(costs.half, forward=half_forward, backward=half_backward),
        recompute={name: replace(known, again=again(name)) for name, known in costs.recompute.items()},
        extra_forward=fit((t.forward - t.layers_forward for t in times), False),
        extra_backward=extra_backward,
    )
    return with_launches(measured, launches, formula)


class Times(NamedTuple):
    """Microseconds of each pass, for the whole stage and for its layers alone.

    Times of weight gradients are included in the backward's; they are known separately only where they are split.
    """

    forward: float
    backward: float
    layers_forward: float
    layers_backward: float
    weight: float
    layers_weight: float


def multiple_of(stage: MegatronStage) -> int:
    """Return the divisor of all measured token counts."""
    return math.lcm(MULTIPLE, stage.token_multiple)


def _limits(costs: StageCosts) -> tuple[int, int, int]:
    """Return the device's limits: the factor on tokens, the tokens that fit a tenth of its memory, and the longest context.

    Total memory counts, not free memory, which differs from rank to rank: ranks that share a layer must run the same cases.
    """
    if not torch.cuda.is_initialized():
        return 1, 1 << 30, LONGEST_CONTEXT
    per_token = (costs.num_layers + 1) * costs.layer_bytes_per_token + costs.extra_bytes_per_token + costs.head_bytes_per_token
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return _GPU_FACTOR, int(memory / 10 / per_token), _GPU_LONGEST_CONTEXT


def _timer(stage: MegatronStage) -> Timer:
    """Return the clock of a stage's device; wall time where ranks share a layer and so wait for each other."""
    config = stage.config
    sharing = config.tensor_model_parallel_size * config.context_parallel_size * config.expert_model_parallel_size
    return Timer(stage.message(1)[2], alone=sharing == 1)


@dataclass(slots=True)
class _Alive:
    """A case between its forward and its backward, with the times of events in microseconds."""

    timer: Timer
    times_us: dict[str, float] = field(default_factory=dict)
    context: ChunkContext | None = None
    hidden: Tensor | None = None
    output: Tensor | None = None

    def note(self, event: str) -> None:
        self.times_us[event] = self.timer.now_us()


def _medians(
    stage: MegatronStage, cases: Sequence[Case], recompute: Recompute = NO_RECOMPUTE, repeats: int = _REPEATS
) -> list[Times]:
    """Return the median times of all cases over several rounds, after one warm-up round.

    Rounds spread any drift of the machine's speed over all cases. Each round has its own order of cases, the same on all ranks,
    because the case before determines the content of the caches.
    """
    seen: list[list[Times]] = [[] for _ in cases]
    for number in range(repeats + 1):
        order = list(range(len(cases)))
        Random(number).shuffle(order)
        for at, took in zip(order, _round(stage, [cases[at] for at in order], recompute), strict=True):
            seen[at].append(took)
    return [Times(*map(statistics.median, zip(*some[1:], strict=True))) for some in seen]


def _round(stage: MegatronStage, cases: Sequence[Case], recompute: Recompute) -> list[Times]:
    """Time all cases once, with a few alive at a time as in a pipeline.

    So what a backward needs is no longer in the caches, and memory is allocated and freed as in training. The first few cases
    run once more in advance, so that they too find memory already allocated.
    """
    times: list[Times] = []
    alive: deque[_Alive] = deque()
    for number, case in enumerate([*cases[:_ALIVE], *cases]):
        alive.append(_begin(stage, number, case, recompute))
        if len(alive) > _ALIVE:
            times.append(_end(stage, alive.popleft()))
    return [*times, *(_end(stage, one) for one in alive)][_ALIVE:]


def _begin(stage: MegatronStage, number: int, case: Case, recompute: Recompute) -> _Alive:
    view = case.view(number)
    if view is not None:
        _fill(stage, view)
    one = _Alive(_timer(stage))
    one.context, one.hidden = enter(stage, case.chunk(number), view, recompute)
    with watched([stage.decoder], one.note):
        one.note("forward")
        one.output = stage.forward(one.context, one.hidden)
        one.note("forward end")
    return one


def _end(stage: MegatronStage, one: _Alive) -> Times:
    assert one.output is not None
    assert one.context is not None
    one.note("backward")
    backward(stage, one.output, one.context, keep_weights=stage.weights is not None)
    one.hidden = one.output = None  # takes time too
    one.note("backward end")
    others_us, weights_us = (
        (0.0, 0.0) if stage.weights is None else [one.timer.now_us() - one.times_us["backward end"] for _ in run_weights(stage)]
    )
    if one.context.view is not None:
        for layer in _layers(stage):
            stage.relay.release(layer, one.context.view)
    at_us = one.times_us
    layers_us = at_us.get("gradient out", at_us["backward end"]) - at_us.get("gradient in", at_us["backward"])
    return Times(
        forward=at_us["forward end"] - at_us["forward"],
        backward=at_us["backward end"] - at_us["backward"] + weights_us,
        layers_forward=at_us["out"] - at_us["in"],
        layers_backward=layers_us + weights_us - others_us,
        weight=weights_us,
        layers_weight=weights_us - others_us,
    )


def _fill(stage: MegatronStage, view: SliceView) -> None:
    """Fill the relay with keys and values of the prefix of a slice, by repeating those of a few tokens."""
    head = min(multiple_of(stage), view.start)
    first = replace(view, start=0, end=head)
    with torch.no_grad():
        forward(stage, Chunk((Segment(view.sequence, 0, head),)), first)
        if head == view.start:
            return
        rest = replace(view, start=head, end=view.start)
        for layer in _layers(stage):
            few = stage.relay.filled(layer, first)
            stage.relay.append(layer, rest, [x.repeat(-(-rest.num_cached // head), 1, 1)[: rest.num_cached] for x in few])


def _layers(stage: MegatronStage) -> list[int]:
    """Return the numbers of the stage's layers in the relay."""
    return [part.layer_number for part in stage.decoder.modules() if isinstance(part, RelayAttention)]
