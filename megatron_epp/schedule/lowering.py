"""Lowering: a plan's actions with the sends and receives between them, per rank, in the order to issue them."""

from __future__ import annotations

from collections import defaultdict

from megatron_epp.schedule.action import Action, Op
from megatron_epp.schedule.errors import PlanError
from megatron_epp.schedule.graph import build_graph, receiver
from megatron_epp.schedule.issue import place_copies
from megatron_epp.schedule.plan import Plan
from megatron_epp.schedule.simulate import explain, play

_SEND = {Op.F: Op.SEND_F, Op.B: Op.SEND_B}
_RECV = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}


def lower(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """Add the messages to a plan, and put copies among the compute actions (`place_copies`).

    A send stands right after its producer. A receive stands one compute action before its consumer, so that the message
    travels beside compute, unless the message is only produced after that action; then right before its consumer. Stages on
    one rank exchange no messages.

    Whoever runs the result matches messages first in, first out per link: source rank, destination rank and direction (F or
    B). On each link the receives stand in the order of the sends; where the receiver consumes in another order, which only
    boundaries that share a link may do, the receives that came first are brought forward. With a communicator per link it
    runs to its end whether sends are buffered and receives block, or both are posted and meet.

    Why it cannot hang: take the order in which the simulated actions end, which respects every dependency. A receive only
    ever stands before an action that ends later than the message's producer, so adding the receives adds no cycle.

    Raises:
        PlanError: an action is missing or doubled, or the order deadlocks.
    """
    graph = build_graph(plan)
    played = play(graph)
    if played.blocked:
        raise PlanError("the order deadlocks: " + "; ".join(explain(graph, blocked) for blocked in played.blocked))
    ended = [0] * len(graph.steps)
    for place, number in enumerate(sorted(played.order, key=played.end_us.__getitem__)):
        ended[number] = place

    links: dict[tuple[int, int, Op], list[tuple[int, int]]] = defaultdict(list)  # in send order: (producer, slot)
    for rank, numbers in enumerate(graph.tracks[: plan.num_ranks]):
        for producer in numbers:
            op, _, chunk = action = graph.steps[producer].action
            to_stage = receiver(plan, action)
            if to_stage is None:
                continue
            slot = graph.index[Action(op, to_stage, chunk)]
            to_rank = plan.placement[to_stage]
            if slot > graph.tracks[to_rank].start and ended[producer] < ended[slot - 1]:
                slot -= 1
            links[rank, to_rank, op].append((producer, slot))

    receives: dict[int, list[int]] = defaultdict(list)  # producers of the messages to receive before a step
    for messages in links.values():
        before = len(graph.steps)
        for producer, slot in reversed(messages):
            before = min(before, slot)
            receives[before].append(producer)

    rows = []
    for rank, numbers in enumerate(graph.tracks[: plan.num_ranks]):
        row: list[Action] = []
        copies = place_copies(graph, played.start_us, played.end_us, rank)
        for place, number in enumerate(numbers):
            row += copies.get(place, ())
            for producer in sorted(receives[number], key=ended.__getitem__):
                row.append(_receive(plan, graph.steps[producer].action))
            action = graph.steps[number].action
            row.append(action)
            if receiver(plan, action) is not None:
                row.append(action._replace(op=_SEND[action.op]))
        rows.append(tuple(row))
    return tuple(rows)


def _receive(plan: Plan, sent: Action) -> Action:
    stage = receiver(plan, sent)
    assert stage is not None
    return Action(_RECV[sent.op], stage, sent.chunk)
