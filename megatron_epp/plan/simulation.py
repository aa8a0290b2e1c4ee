"""Event simulation of a plan: times of every action, idle share of the ranks, and live bytes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import Booleans, Bytes, Integers
from megatron_epp.plan.copy_positions import place_copies
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.graph import Graph, build_graph
from megatron_epp.plan.operations import MessageKind
from megatron_epp.plan.plan import AnyStep, Plan


class Message(NamedTuple):
    """One message in flight, a `SEND_F` or `SEND_B`: sent when its producer ends, at `start_us`, and received at `end_us`."""

    action: Action
    src_rank: int
    dst_rank: int
    start_us: float
    end_us: float


class MemoryEvent(NamedTuple):
    """Allocation (`delta_bytes` >= 0) or release (<= 0) of a step's bytes.

    A compute step allocates when it starts and releases when it ends. A load allocates, and an offload releases, at the
    position at which the rank issues that (`plan.copy_positions`): a copy that starts or ends while a compute step runs counts
    for all of that step.
    """

    time_us: float
    delta_bytes: int
    step: AnyStep
    position: int
    at_end: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """Simulated times and memory of a plan. Tables are ``[rank][position]``, positions as in `plan.ranks` and `plan.copies`.

    `peak_bytes` are the most bytes live on each rank at one time, static bytes included.
    """

    plan: Plan
    start_us: tuple[tuple[float, ...], ...]
    end_us: tuple[tuple[float, ...], ...]
    copy_start_us: tuple[tuple[float, ...], ...]
    copy_end_us: tuple[tuple[float, ...], ...]
    makespan_us: float
    peak_bytes: tuple[int, ...]
    graph: Graph = field(repr=False, compare=False)
    played: Playback = field(repr=False, compare=False)

    @property
    def busy_us(self) -> tuple[float, ...]:
        """Compute time of each rank; copies are overlapped with it and do not count."""
        return tuple(sum(step.time_us for step in steps) for steps in self.plan.ranks)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time until the makespan in which they do not compute."""
        total_us = self.plan.num_ranks * self.makespan_us
        return 1.0 - sum(self.busy_us) / total_us if total_us > 0 else 0.0

    def live_bytes(self, rank: int) -> list[tuple[float, int]]:
        """Steps ``(time_us, bytes)`` of the rank's live bytes, from its static bytes at time 0, each valid until the next."""
        events = [event for event in self.memory_events(rank) if event.delta_bytes]
        times = (0.0, *(event.time_us for event in events))
        live = accumulate((event.delta_bytes for event in events), initial=self.plan.static_bytes[rank])
        return list(zip(times, live, strict=True))

    def planned_bytes(self, rank: int, action: Action) -> int:
        """Live bytes of the rank while one of its actions runs. Raises `PlanError` if it has no such action."""
        live = self.plan.static_bytes[rank]
        for event in self.memory_events(rank):
            live += event.delta_bytes
            if action in event.step.actions and not event.at_end:
                return live
        raise PlanError(f"rank {rank} has no action {action}")

    def memory_events(self, rank: int) -> list[MemoryEvent]:
        """Allocations and releases of a rank in the order in which it issues them; copies' are between two compute steps."""
        graph, start, end = self.graph, self.played.start_us, self.played.end_us
        compute, copies = graph.tracks[rank], graph.tracks[graph.num_ranks + rank]
        changes = memory_changes(graph, self.played, rank)
        events, now_us, index = [], 0.0, 0
        for number, at_end, delta in zip(*(column.tolist() for column in changes), strict=True):
            time_us = end[number] if at_end else start[number]
            if number in compute:
                if at_end:
                    now_us, index = time_us, index + 1
            else:
                next_us = start[compute[index]] if index < len(compute) else math.inf
                time_us = max(now_us, min(time_us, next_us))
            position = number - (compute if number in compute else copies).start
            events.append(MemoryEvent(time_us, delta, graph.steps[number], position, at_end))
        return events

    def messages(self) -> list[Message]:
        """Every message between ranks, in rank and position order of its producer; no collectives."""
        graph, ends_us = self.graph, self.played.end_us
        return [
            Message(
                transfer.source._replace(op=carries.send),
                graph.where(transfer.producer)[0],
                graph.where(transfer.consumer)[0],
                ends_us[transfer.producer],
                ends_us[transfer.producer] + transfer.time_us,
            )
            for transfer in graph.transfers
            if isinstance(carries := transfer.carries, MessageKind)
        ]


class Blocked(NamedTuple):
    """A track that cannot proceed: the step at its head waits for one that never ends."""

    number: int
    waits_for: int


@dataclass(frozen=True, slots=True)
class Playback:
    """Times by step number, numbers in an order that respects all dependencies, and the tracks that hang."""

    start_us: list[float]
    end_us: list[float]
    order: list[int]
    blocked: list[Blocked]


def play(graph: Graph) -> Playback:
    """Run every track as far as possible; each step starts as soon as its track is free and all its dependencies have arrived.

    A copy also waits for its turn on its rank's link to the host, which carries one copy at a time in either direction: first
    come, first served, and the lowest rank first among equals. When no track can proceed without a turn, the copy that came
    first gets it: any later copy becomes ready only after one of the waiting ones has ended, so none is overtaken.
    """
    tracks, ranks, num_compute = graph.tracks, graph.num_ranks, graph.columns.num_compute
    ops = [step.action.op for step in graph.steps[num_compute:]]
    took_us, starts = graph.columns.time_us.tolist(), graph.need_starts.tolist()
    needs = list(zip(graph.needs.tolist(), graph.need_us.tolist(), strict=True))
    start = [0.0] * len(took_us)
    end = [-1.0] * len(took_us)  # below zero: has not run
    cursor = [numbers.start for numbers in tracks]
    free = [0.0] * len(tracks)
    link_free: dict[tuple[int, Op], float] = {}
    waiting: dict[int, list[int]] = {}
    turns: list[tuple[float, int]] = []  # copies that could start, by track
    ready = list(range(len(tracks)))
    order: list[int] = []
    while ready or turns:
        has_turn = not ready
        track = heapq.heappop(turns)[1] if has_turn else ready.pop()
        now = free[track]
        for i in range(cursor[track], tracks[track].stop):
            begin = now
            for need, message_us in needs[starts[i] : starts[i + 1]]:
                arrives = end[need]
                if arrives < 0.0:
                    waiting.setdefault(need, []).append(track)
                    break
                arrives += message_us
                if arrives > begin:
                    begin = arrives
            else:
                if track >= ranks:
                    if not has_turn:
                        heapq.heappush(turns, (begin, track))
                        break
                    has_turn, lane = False, (graph.links[track - ranks], ops[i - num_compute])
                    begin = max(begin, link_free.get(lane, 0.0))
                    link_free[lane] = begin + took_us[i]
                start[i] = begin
                now = end[i] = begin + took_us[i]
                order.append(i)
                cursor[track] = i + 1
                if i in waiting:
                    ready += waiting.pop(i)
                continue
            break
        free[track] = now
    heads = {cursor[track]: need for need, stuck in waiting.items() for track in stuck}
    return Playback(start, end, order, [Blocked(number, heads[number]) for number in sorted(heads)])


def simulate(plan: Plan) -> Timeline:
    """Time a plan.

    A step starts when its rank is free and everything it needs is done and its message has arrived, in the order of its
    rank's list. Offloads and loads are overlapped with compute, one at a time per rank; ranks that share a link to the host
    (`Plan.host_links`) take turns, one copy at a time in either direction. A link carries both directions at once, each at its
    full rate, as PCI Express does.

    On hardware, copies of two ranks that overlap share the link evenly instead. The last of them ends at the same time as with
    turns; earlier ones end later than simulated, by at most the time of the others. Planners avoid overlapping copies, so that
    the difference is small.

    Returns:
        start and end of every step in microseconds and the live bytes over time, per rank.

    Raises:
        PlanError: an action is missing or doubled, or the order deadlocks; then the first action each blocked rank stops at
            is named with the one it waits for.
    """
    graph = build_graph(plan)
    played = play(graph)
    if played.blocked:
        raise PlanError("the order deadlocks: " + "; ".join(explain(graph, blocked) for blocked in played.blocked))
    return timeline_of(plan, graph, played)


def timeline_of(plan: Plan, graph: Graph, played: Playback) -> Timeline:
    rows = [slice(numbers.start, numbers.stop) for numbers in graph.tracks]
    start = [tuple(played.start_us[row]) for row in rows]
    end = [tuple(played.end_us[row]) for row in rows]
    ranks = plan.num_ranks
    peaks = []
    for rank, static in enumerate(plan.static_bytes[:ranks]):
        live = np.cumsum(memory_changes(graph, played, rank).delta_bytes)
        peaks.append(static + int(live.max(initial=0)))
    return Timeline(
        plan,
        *(tuple(start[:ranks]), tuple(end[:ranks]), tuple(start[ranks:]), tuple(end[ranks:])),
        makespan_us=max((row[-1] for row in end if row), default=0.0),
        peak_bytes=tuple(peaks),
        graph=graph,
        played=played,
    )


def explain(graph: Graph, blocked: Blocked) -> str:
    """Format a blocked track as ``rank 0 at position 1: 0B0 waits for 1B0 (rank 1, position 3)``."""
    rank, position = graph.where(blocked.number)
    waits_rank, waits_position = graph.where(blocked.waits_for)
    action, waits_for = graph.steps[blocked.number].action, graph.steps[blocked.waits_for].action
    return f"rank {rank} at position {position}: {action} waits for {waits_for} (rank {waits_rank}, position {waits_position})"


class MemoryChanges(NamedTuple):
    """Allocations and releases of a rank, in the order in which it issues them: growth of memory by a step, or at its end."""

    number: Integers
    at_end: Booleans
    delta_bytes: Bytes


def memory_changes(graph: Graph, played: Playback, rank: int) -> MemoryChanges:
    """Find them: of compute steps when they start and end, of copies when they are issued, and at their `FREE`."""
    compute, columns = graph.tracks[rank], graph.columns
    number = np.repeat(np.arange(compute.start, compute.stop), 2)
    at_end = np.tile([False, True], len(compute))
    issued = place_copies(graph, played.start_us, played.end_us, rank)
    copies = [(2 * index, action) for index in sorted(issued) for action in issued[index]]
    if copies:
        positions = [position for position, _ in copies]
        own = (action._replace(op=Op.O) if action.op is Op.FREE else action for _, action in copies)
        moved = list(map(graph.listed.number, own))
        number = np.insert(number, positions, np.array(moved, dtype=np.int64))
        at_end = np.insert(at_end, positions, [action.op is Op.FREE for _, action in copies])
    return MemoryChanges(number, at_end, np.where(at_end, -columns.free_bytes[number], columns.alloc_bytes[number]))
