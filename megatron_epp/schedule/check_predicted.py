"""The part of `check` that holds what a plan says of itself against its simulation: reports and logs print these numbers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.schedule.plan import Prediction
from megatron_epp.schedule.simulate import Timeline
from megatron_epp.schedule.violation import Violation

_NOISE = 1e-9
"""Sums of times may differ by this share of them: they are added in another order."""


def check_predicted(timeline: Timeline) -> Iterator[Violation]:
    """Makespan, bubble and peaks are the simulator's, and the bound is below the makespan. `Prediction.none` says nothing."""
    plan, predicted = timeline.plan, timeline.plan.predicted
    if predicted == Prediction.none(plan.num_ranks):
        return
    makespan_us, bubble = timeline.makespan_us, timeline.bubble_fraction
    noise_us = _NOISE * makespan_us
    # `not <=` in the place of `>`: what is not a number is a fault too.
    if not abs(predicted.makespan_us - makespan_us) <= noise_us:
        yield _fault(f"predicted.makespan_us is {predicted.makespan_us}; the simulator finds {makespan_us}")
    if not 0.0 <= predicted.lower_bound_us <= makespan_us + noise_us:
        reason = f"predicted.lower_bound_us is {predicted.lower_bound_us}; it is within 0 and the makespan of {makespan_us}"
        yield _fault(reason)
    if not abs(predicted.bubble_fraction - bubble) <= _NOISE:
        yield _fault(f"predicted.bubble_fraction is {predicted.bubble_fraction}; the simulator finds {bubble}")
    for rank, (said, found) in enumerate(zip(predicted.peak_bytes, timeline.peak_bytes, strict=True)):
        if said != found:
            yield _fault(f"predicted.peak_bytes is {said}; the simulator finds {found}", rank)


def _fault(reason: str, rank: int | None = None) -> Violation:
    return Violation(rank, None, None, reason)
