"""Timeline of what a plan's ranks launch, as a GPU with hardware queues would run it: recorded, run by the machine, drawn.

python -m tests.support.runtime.launch_timeline timeline.png [--plan looped] [--queues 1] [--print]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_epp.plan import to_json
from megatron_epp.plan.operations import operation
from megatron_epp.report.lanes import DPI, WIDTH_INCHES, draw_entries, label_time
from tests.support.plan.queue_machine import Machine, times_of
from tests.support.runtime.launch_recorder import (
    COMPUTE,
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
        alter: changes the launches of a rank before they run.
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


def picture(spans: Sequence[Span], title: str):
    """Draw a lane for each stream of each rank."""
    from matplotlib.figure import Figure

    used = dict.fromkeys((span.rank, span.launch.stream) for span in spans)
    lanes = sorted(used, key=lambda lane: (lane[0], lane[1] != COMPUTE))
    names = {lane: _name([s.launch for s in spans if (s.rank, s.launch.stream) == lane]) for lane in lanes}
    figure = Figure(figsize=(WIDTH_INCHES, 1.6 + 0.24 * len(lanes)), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    for height, lane in enumerate(lanes):
        own = [span for span in spans if (span.rank, span.launch.stream) == lane and span.launch.kind != WAIT]
        bars = [(span.start_us / 1e3, (span.end_us - span.start_us) / 1e3) for span in own]
        edges = {"edgecolor": "white", "linewidth": 0.4}
        axis.broken_barh(bars, (height - 0.4, 0.8), facecolors=[_colour(span.launch) for span in own], **edges)
        if lane[1] == COMPUTE and height:
            axis.axhline(height - 0.5, color="black", linewidth=0.8)
    axis.set_ylim(len(lanes) - 0.4, -0.6)
    axis.set_yticks(range(len(lanes)), [f"rank {rank} {names[rank, stream]}" for rank, stream in lanes])
    axis.tick_params(axis="y", length=0, labelsize=7)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    label_time(axis, max(span.end_us for span in spans))
    kinds = {(_colour(span.launch), _meaning(span.launch)) for span in spans if span.launch.kind != WAIT}
    draw_entries(figure, sorted(kinds, key=lambda one: one[1]), len(kinds))
    return figure


def _name(launches: Sequence[RecordedLaunch]) -> str:
    """Name a side stream by what runs on it."""
    kinds = sorted({launch.kind for launch in launches} - {WAIT})
    return f"{' and '.join(kinds)}s" if launches[0].stream.startswith("side") else launches[0].stream


def _meaning(launch: RecordedLaunch) -> str:
    meanings = {SEND: "send", RECEIVE: "receive, from its start, and its wait for the other side", REDUCTION: "reduction"}
    meanings[UPLOAD] = "upload"
    return meanings.get(launch.kind) or operation(launch.action.op).text


def _colour(launch: RecordedLaunch) -> str:
    return COLOURS.get(launch.kind) or operation(launch.action.op).colour


def _with_copies(plan):
    """The plan with half of every chunk copied away and back, in about the time of its forward."""
    plan = offloading(plan, 0.5)
    return replace(plan, copies=tuple(tuple(copy._replace(time_us=_COPY_US) for copy in row) for row in plan.copies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", help="picture: .png, .svg or .pdf")
    parser.add_argument("--plan", choices=PLANS, default="one stage per rank")
    parser.add_argument("--queues", type=int, default=1, help="hardware queues of a GPU (default: 1)")
    parser.add_argument("--print", action="store_true", help="print every launch with its times")
    args = parser.parse_args()
    plan = PLANS[args.plan]()
    spans = timeline([plan], args.queues, reduce_us=_longest_backward_us(plan))
    if args.print:
        for span in spans:
            waits = f", behind launches {', '.join(map(str, span.launch.waits))}" if span.launch.waits else ""
            times = f"{span.start_us:10.1f} {span.end_us:10.1f} us"
            sys.stdout.write(f"rank {span.rank} {times}  {span.launch.stream}: {span.launch.text}{waits}\n")
    queues = "1 hardware queue" if args.queues == 1 else f"{args.queues} hardware queues"
    picture(spans, f"{args.plan}: launches recorded on a CPU, run on {queues} for each GPU").savefig(args.output)


def _longest_backward_us(plan) -> float:
    return max(step.time_us for row in plan.ranks for step in row)


if __name__ == "__main__":
    main()
