"""The binding dependency of every step of an iteration, for which it waits longest, and the critical path along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from megatron_epp.plan.graph import Graph, Transfer
from megatron_epp.plan.simulation import Timeline

ABSENT_US = -math.inf
"""Start and end of a step without known times."""


class DependencyKind(IntEnum):
    START = 0  # none: it may start with the iteration
    ORDER = 1  # the step before it in its rank's list has ended
    NEED = 2  # a step whose result it needs has ended
    TRANSFER = 3  # the result of another rank's step has arrived
    HOST_LINK = 4  # another copy has left the link to the host


class BindingDependency(NamedTuple):
    """Dependency of a step that is met last."""

    kind: DependencyKind
    number: int = -1  # step that meets it; -1 for `DependencyKind.START`
    transfer_us: float = 0.0  # time from the end of that step until the dependency is met


def binding_dependencies(graph: Graph, start_us: Sequence[float], end_us: Sequence[float]) -> list[BindingDependency]:
    """Return each step's dependency that is met last, of equal ones the rank's order; unknown times are `ABSENT_US`."""
    binding = [BindingDependency(DependencyKind.START)] * len(graph.steps)
    on_link = _before_on_host_link(graph, start_us)
    for numbers in graph.tracks:
        for number in numbers:
            before = number - 1 if number > numbers.start else -1
            last, met_us = BindingDependency(DependencyKind.START), 0.0
            if before >= 0 and end_us[before] > 0.0:
                last, met_us = BindingDependency(DependencyKind.ORDER, before), end_us[before]
            for need, message_us in graph.needs_of(number):
                if end_us[need] + message_us > met_us:
                    kind = DependencyKind.TRANSFER if message_us else DependencyKind.NEED
                    last, met_us = BindingDependency(kind, need, message_us), end_us[need] + message_us
            other = on_link.get(number, -1)
            if other >= 0 and end_us[other] > met_us:
                last = BindingDependency(DependencyKind.HOST_LINK, other)
            binding[number] = last
    return binding


def critical_path(binding: Sequence[BindingDependency], end_us: Sequence[float]) -> list[int]:
    """Return the chain of steps that sets the makespan, from the start of the iteration to its end."""
    number = max(range(len(end_us)), key=end_us.__getitem__, default=-1)
    path = []
    while number >= 0:
        path.append(number)
        number = binding[number].number
    return path[::-1]


def times_of(timeline: Timeline) -> tuple[list[float], list[float]]:
    """Start and end of the steps of a simulated plan, by their numbers in its graph."""
    starts = (*timeline.start_us, *timeline.copy_start_us)
    ends = (*timeline.end_us, *timeline.copy_end_us)
    return [time_us for row in starts for time_us in row], [time_us for row in ends for time_us in row]


def transfers_between(graph: Graph) -> dict[tuple[int, int], Transfer]:
    """Transfers by the numbers of their two steps; of several between the same steps, the longest."""
    ordered = sorted(graph.transfers, key=lambda transfer: transfer.time_us)
    return {(transfer.producer, transfer.consumer): transfer for transfer in ordered}


def _before_on_host_link(graph: Graph, start_us: Sequence[float]) -> dict[int, int]:
    """Number of the copy before each copy on the same link to the host in the same direction."""
    copies = [
        (number, track - graph.num_ranks)
        for track in range(graph.num_ranks, len(graph.tracks))
        for number in graph.tracks[track]
    ]
    last: dict[tuple[int, str], int] = {}
    before = {}
    for number, rank in sorted(copies, key=lambda copy: start_us[copy[0]]):
        lane = graph.links[rank], graph.steps[number].action.op
        before[number] = last.get(lane, -1)
        last[lane] = number
    return before
