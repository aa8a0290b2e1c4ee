"""Timeline of what a plan's ranks launch, as a GPU with hardware queues would run it: recorded, and run by the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron_epp.plan import to_json
from tests.support.plan.queue_machine import Machine, times_of
from tests.support.runtime.launch_recorder import (
    RECEIVE,
    REDUCTION,
    SEND,
    UPLOAD,
    WAIT,
    RecordedLaunch,
    RecordedStage,
    record,
)
from tests.support.runtime.runtime_plans import offloading, planned

LENGTHS = (40, 22, 13, 9, 9, 6, 5, 3)
PLANS = {
    "one stage per rank": partial(planned, LENGTHS, (1, 1, 1, 1), slices=4),
    "looped": partial(planned, LENGTHS, (1, 1, 1, 1), placement=(0, 1, 0, 1), slices=4),
    "v": partial(planned, LENGTHS, (1, 1, 1, 1), placement=(0, 1, 1, 0), slices=4),
    "split weight gradients": partial(planned, LENGTHS, (1, 1, 1), slices=4, split_weight=True),
    "offload": lambda: _with_copies(planned(LENGTHS, (1, 1, 1), slices=4)),
}
_COPY_US = 300.0
COLOURS = {SEND: "#E69F00", RECEIVE: "#F0C75E", REDUCTION: "#CC79A7", UPLOAD: "#44AA99", WAIT: "#888888"}


@dataclass(frozen=True, slots=True)
class Span:
    """A launch of a rank on the machine; it starts to wait for its other sides at `start_us`."""

    rank: int
    launch: RecordedLaunch
    start_us: float
    end_us: float


def timeline(plans, queues=1, reduce_us=0.0, num_buckets=1, alter=lambda launches: launches, coalesces=True) -> list[Span]:
    """Record the replicas' plans and run all their ranks together.

    Args:
        plans: of the replicas of one pipeline, whose reductions join them.
        queues: hardware queues of each rank.
        reduce_us: time of the reduction of every bucket.
        num_buckets: of the gradients of every rank's first stage.
        coalesces: the gradients of a rank's other stages are reduced by one launch; else they have as many buckets.
    """
    make_stage = partial(RecordedStage, num_buckets=num_buckets, coalesces=coalesces)
    recorded = [
        alter(record(plan, rank, number, make_stage).launches)
        for number, plan in enumerate(plans)
        for rank in range(plan.num_ranks)
    ]
    times_us = [times for plan in plans for times in times_of(to_json(plan))]
    for times, launches in zip(times_us, recorded, strict=True):
        times |= {launch.text: reduce_us for launch in launches if launch.kind == REDUCTION}
    machine = Machine(recorded, queues, times_us=times_us)
    stuck = machine.run()
    assert not stuck, stuck
    return [
        Span(rank, launch, machine.starts_us[rank, number], machine.ends_us[rank, number])
        for rank, launches in enumerate(recorded)
        for number, launch in enumerate(launches)
    ]


def _with_copies(plan):
    """The plan with half of every chunk copied away and back, in about the time of its forward."""
    plan = offloading(plan, 0.5)
    return replace(plan, copies=tuple(tuple(copy._replace(time_us=_COPY_US) for copy in row) for row in plan.copies))
