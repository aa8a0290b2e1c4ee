"""Lowering: a plan's actions with the sends, receives and reductions between them, per rank, in the order to issue them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.copy_positions import place_copies
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.graph import Graph, build_graph
from megatron_epp.plan.operations import Collective, of_stages, operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulate import Playback, explain, play

_Moment = tuple[float, int, int]
"""A point of the simulation: time, index of the step in playback order, and 0 at its start, 1 at its end, more after it."""

_Posted = tuple[_Moment, int, Action]
"""A send, receive or reduction of one rank: its due moment, its stream, and the action."""


def lower(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """Add messages and reductions to a plan, and put copies among the compute actions (`place_copies`).

    All ranks follow one order of events. A message is placed at the end of its producer on both sides. A compute action is
    placed between its simulated start and end: at its start, but after the receives of messages that are produced while it
    runs, up to the second of one link. So such a message is overlapped with compute, and no receive makes compute wait for the
    receive before it on its stream. The reduction of a stage's gradients is placed after the last of them and after the
    reductions of all later stages. Stages on one rank exchange no messages.

    That order is taken from a simulation without copies. Replicas that share experts have equal compute times but different
    copies, so they all have the same order of forwards, backwards and messages.

    The result cannot hang, whatever times actions and messages really take. Each rank's row is its part of one order, in which
    every event is after those it needs and both sides of a message are together. So the first event of that order which has
    not ended can always run, even if each launch waits for the end of all earlier launches of its rank. That is stricter than
    any number of CUDA hardware queues, and than device-wide synchronisation before any launch. Over replicas, gathers of
    parameters are by ascending stage and reductions by descending stage in every plan's order, so one order covers all
    replicas' events too. `launches.blocked` checks rows for it.

    Messages are paired first in, first out per link: source rank, destination rank and direction (F or B).

    Raises:
        PlanError: an action is missing or doubled, or the order deadlocks.
    """
    graph = build_graph(plan)
    played = play(graph)
    if played.blocked:
        raise PlanError("the order deadlocks: " + "; ".join(explain(graph, blocked) for blocked in played.blocked))
    return issue_order(plan, graph, played)


def issue_order(plan: Plan, graph: Graph, played: Playback) -> tuple[tuple[Action, ...], ...]:
    """Return the lowered rows of a plan whose playback reached its end, see `lower`."""
    alone = played if (compute := graph.without_copies()) is graph else play(compute)
    rank_in_order = [0] * len(compute.steps)
    for index, number in enumerate(alone.order):
        rank_in_order[number] = index
    ends = list(zip(alone.end_us, rank_in_order, [1] * len(rank_in_order), strict=True))
    posted = _transfers(graph, ends)
    for rank, entry in _reductions(plan, graph, ends):
        posted[rank].append(entry)
    rows = []
    for rank, numbers in enumerate(graph.tracks[: plan.num_ranks]):
        row: list[Action] = []
        copies = place_copies(graph, played.start_us, played.end_us, rank)
        due = sorted(posted[rank])
        at, last = 0, len(due)
        for index, number in enumerate(numbers):
            start = alone.start_us[number], rank_in_order[number], 0
            while at < last and due[at][0] < start:
                row.append(due[at][2])
                at += 1
            if index in copies:
                row += copies[index]
            if at < last and due[at][0] < ends[number]:
                ahead = _count_ahead(due, at, ends[number])
                row += [action for _, _, action in due[at:ahead]]
                at = ahead
            row += graph.steps[number].actions
        rows.append((*row, *(action for _, _, action in due[at:])))
    return tuple(rows)


def _transfers(graph: Graph, ends: Sequence[_Moment]) -> list[list[_Posted]]:
    """All sides of every message and collective, by rank."""
    posted: list[list[_Posted]] = [[] for _ in range(graph.num_ranks)]
    streams: dict[tuple[Op, ...] | tuple[Op, int, int], int] = {}
    rank_of = [rank for rank, numbers in enumerate(graph.tracks[: graph.num_ranks]) for _ in numbers]
    gathered: dict[Action, _Moment] = {}
    for transfer in graph.transfers:
        producer, consumer, chunk, ((_, site), (_, to_site), carries, _) = transfer
        due = ends[producer]
        if isinstance(carries, Collective):
            action = Action(carries.op, 0, chunk)
            gathered[action] = max(due, gathered.get(action, due))
            continue
        rank, to_rank = rank_of[producer], rank_of[consumer]
        stream = streams.setdefault((carries.send, rank, to_rank), len(streams))
        posted[rank].append((due, stream, Action(carries.send, site, chunk)))
        posted[to_rank].append((due, stream, Action(carries.receive, to_site, chunk)))
    for action, due in gathered.items():
        stream = streams.setdefault((action.op,), len(streams))
        for rank, row in enumerate(posted):
            row.append((due, stream, action._replace(stage=rank)))
    return posted


def _reductions(plan: Plan, graph: Graph, ends: Sequence[_Moment]) -> Iterator[tuple[int, _Posted]]:
    """Yield the reduction of every stage, last stage first, each with its rank.

    Gradients of what a rank has besides its stages are reduced with its first stage.
    """
    last: dict[int, tuple[int, Action]] = {}
    for rank, numbers in enumerate(graph.tracks[: plan.num_ranks]):
        first = plan.placement.index(rank) if rank in plan.placement else 0
        for number in numbers:
            for action in graph.steps[number].actions:
                kind = operation(action.op)
                if kind.gives_gradients:
                    stage = action.stage if kind.sites is of_stages else first
                    last[stage] = number, action._replace(stage=stage)
    time_us, index = 0.0, 0
    for behind, stage in enumerate(sorted(last, reverse=True)):
        number, action = last[stage]
        time_us, index, _ = max((time_us, index, 1), ends[number])
        yield plan.placement[stage], ((time_us, index, 2 + behind), -stage, action._replace(op=Op.REDUCE))


def _count_ahead(due: Sequence[_Posted], at: int, end: _Moment) -> int:
    """Index of the first entry that may not precede an action that ends then: the second of a stream, or one due later."""
    streams = set()
    while at < len(due) and due[at][0] < end and due[at][1] not in streams:
        streams.add(due[at][1])
        at += 1
    return at
