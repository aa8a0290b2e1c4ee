"""The part of `check` that holds what a plan predicts of itself against its simulation: reports and logs print these numbers.

The simulation goes by the plan's own times and bytes. So what holds is that the numbers follow from the steps, not that a
machine takes as long: times and bytes of the steps, layers of the stages and static bytes are the planner's word, of which only
the range is checked. Of the lower bound no more is checked than that it is not above the makespan.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan.check.tables import NOISE
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.plan import Prediction
from megatron_epp.plan.simulate import Timeline


def check_predicted(timeline: Timeline) -> Iterator[Violation]:
    """Makespan, bubble and peaks are the simulator's, the bound is not above the makespan. `Prediction.none` says nothing."""
    plan, predicted = timeline.plan, timeline.plan.predicted
    if predicted == Prediction.none(plan.num_ranks):
        return
    makespan_us, bubble = timeline.makespan_us, timeline.bubble_fraction
    noise_us = NOISE * makespan_us
    # `not <=` in the place of `>`: what is not a number is a fault too.
    if not abs(predicted.makespan_us - makespan_us) <= noise_us:
        yield _fault(f"predicted.makespan_us is {predicted.makespan_us}; the simulator finds {makespan_us}")
    if not 0.0 <= predicted.lower_bound_us <= makespan_us + noise_us:
        reason = f"predicted.lower_bound_us is {predicted.lower_bound_us}; it is within 0 and the makespan of {makespan_us}"
        yield _fault(reason)
    if not abs(predicted.bubble_fraction - bubble) <= NOISE:
        yield _fault(f"predicted.bubble_fraction is {predicted.bubble_fraction}; the simulator finds {bubble}")
    for rank, (said, found) in enumerate(zip(predicted.peak_bytes, timeline.peak_bytes, strict=True)):
        if said != found:
            yield _fault(f"predicted.peak_bytes is {said}; the simulator finds {found}", rank)


def _fault(reason: str, rank: int | None = None) -> Violation:
    return Violation(rank, None, None, reason)
