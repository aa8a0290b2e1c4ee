"""The part of `check` that compares a plan's predictions, which reports and logs print, with its simulation.

The simulation uses the plan's own times and bytes. So the check proves that the numbers follow from the steps, not that a
machine takes as long: times and bytes of the steps, layers of the stages and static bytes are the planner's estimates, of which
only the range is checked. Of the lower bound it is only checked that it is not above the makespan.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan.check.tables import NOISE
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.plan import Prediction
from megatron_epp.plan.simulate import Timeline


def check_predicted(timeline: Timeline) -> Iterator[Violation]:
    """Yield violations unless makespan, bubble and peaks equal the simulator's, and the lower bound is at most the makespan.

    A plan without predictions (`Prediction.none`) has none.
    """
    plan, predicted = timeline.plan, timeline.plan.predicted
    if predicted == Prediction.none(plan.num_ranks):
        return
    makespan_us, bubble = timeline.makespan_us, timeline.bubble_fraction
    noise_us = NOISE * makespan_us
    # `not <=` instead of `>`: NaN is a fault too.
    if not abs(predicted.makespan_us - makespan_us) <= noise_us:
        yield _fault(f"predicted.makespan_us is {predicted.makespan_us}; the simulator finds {makespan_us}")
    if not 0.0 <= predicted.lower_bound_us <= makespan_us + noise_us:
        reason = f"predicted.lower_bound_us is {predicted.lower_bound_us}; it is within 0 and the makespan of {makespan_us}"
        yield _fault(reason)
    if not abs(predicted.bubble_fraction - bubble) <= NOISE:
        yield _fault(f"predicted.bubble_fraction is {predicted.bubble_fraction}; the simulator finds {bubble}")
    for rank, (planned, simulated) in enumerate(zip(predicted.peak_bytes, timeline.peak_bytes, strict=True)):
        if planned != simulated:
            yield _fault(f"predicted.peak_bytes is {planned}; the simulator finds {simulated}", rank)


def _fault(reason: str, rank: int | None = None) -> Violation:
    return Violation(rank, None, None, reason)
