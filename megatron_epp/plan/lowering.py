"""Lowering: from a plan to all that each rank launches, in the order in which it launches it.

A plan orders the compute actions and copies of every rank. Lowering adds sends and receives of messages, collectives, and the
reductions of gradients, which follow from `plan.operations`. Each of these is due at a moment of a simulation of the plan:

- a message when the action that makes it ends, on both sides, so that it is received in the order in which it is sent;
- a collective when the last action that gives to it ends;
- the reduction of a stage's gradients when its last gradient is complete, and after the reductions of all later stages.

A rank launches in ascending order of slots. Each of its compute actions has four, in this order:

1. what is due before the action starts;
2. copies: offloads, loads and releases of offloaded memory (`place_copies`);
3. what becomes due while the action runs, up to the second launch of one stream: it is launched ahead of the action, which is
   then overlapped with it. The rest comes in slot 1 of the next action;
4. the action.

Four more slots behind the last action hold what is due at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import Booleans, Integers
from megatron_epp.plan.copy_positions import place_copies
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.graph import Graph, build_graph
from megatron_epp.plan.launches import Launches
from megatron_epp.plan.operations import Collective, of_stages, operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulation import Playback, explain, play


def lower(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """Return every rank's launches in order: actions, messages, collectives, reductions and copies.

    Moments are those of a simulation without copies: replicas that share experts have equal compute times but different copies,
    and so the same order of forwards, backwards and messages. Stages on one rank exchange no messages.

    A receive that is launched while the one before it on its stream is not complete would make compute behind it wait for both,
    since the device may have a single hardware queue: hence at most one overlapped launch of a stream for each action.

    The result cannot hang, whatever times actions and messages take: each rank's row is its part of one order, in which every
    event is after what it needs and both sides of a message are together. So the first event of that order which has not ended
    can always run, even if each launch waits for the end of all earlier ones of its rank, which is stricter than any number of
    hardware queues. Over replicas, gathers of parameters are by ascending stage and reductions by descending stage in every
    plan's order, so one order covers all replicas. `proof.deadlock.blocked` checks rows for it.

    Messages are paired first in, first out per link: source rank, destination rank and direction (F or B). Raises `PlanError`
    if an action is missing or doubled, or the order deadlocks.
    """
    graph = build_graph(plan)
    played = play(graph)
    if played.blocked:
        raise PlanError("the order deadlocks: " + "; ".join(explain(graph, blocked) for blocked in played.blocked))
    return issue_order(plan, graph, played).rows()


def issue_order(plan: Plan, graph: Graph, played: Playback) -> Launches:
    """Return the lowered rows of a plan whose playback reached its end, see `lower`."""
    # Moments without copies order everything; copies are put in afterwards, at the positions of the whole playback.
    alone = played if (compute := graph.without_copies()) is graph else play(compute)
    moments, ops = _Moments.of(alone, plan.num_stages), _operations(graph)
    posted = _sorted(_messages(graph, moments, ops), _collectives(graph, moments, ops), _reductions(plan, graph, moments, ops))
    parts = _slots_of_posted(graph, moments, posted), _slots_of_compute(graph, ops), _slots_of_copies(graph, played, ops)
    slots, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(slots, kind="stable")  # stable: launches of one slot stay in the order of their moments
    firsts = [numbers.start for numbers in graph.tracks[: plan.num_ranks]]
    bounds = np.searchsorted(slots[order], _slot(np.arange(plan.num_ranks), np.array(firsts), _DUE_BEFORE))
    op, site, chunk = (column[order] for column in columns)
    return Launches(ops, op, site, chunk, np.append(bounds, len(order)))


class _Moments(NamedTuple):
    """Start and end of each compute step as numbers that ascend as time does; of equal times, the step that was played before
    comes first. `most` is above all.
    """

    start: Integers
    end: Integers
    most: int

    @classmethod
    def of(cls, played: Playback, num_stages: int) -> _Moments:
        """Number the moments of a playback, with room behind each for a reduction of every stage."""
        count, spacing = len(played.order), num_stages + 1
        position = np.zeros(count, dtype=np.int64)
        position[played.order] = np.arange(count)
        # Equal times are common (an action ends as the next one starts): ties follow the playback, which respects all needs.
        order = np.lexsort((np.tile(position, 2), np.array(played.start_us + played.end_us)))
        moments = np.zeros(2 * count, dtype=np.int64)
        moments[order] = np.arange(2 * count) * spacing
        return cls(moments[:count], moments[count:], 2 * count * spacing)


class _Posted(NamedTuple):
    """Sends, receives, collectives and reductions of all ranks, each with the moment at which it is due, and its stream."""

    rank: Integers
    due: Integers
    stream: Integers
    op: Integers
    site: Integers
    chunk: Integers


class _Slots(NamedTuple):
    """Launches of all ranks, each with its slot: ranks launch in ascending order of slots, and in the order of a slot."""

    slot: Integers
    op: Integers
    site: Integers
    chunk: Integers


_DUE_BEFORE, _COPIES, _OVERLAPPED, _COMPUTE = range(4)
"""The four slots of a compute action, in order (see the module)."""


def _slot(rank: Integers, number: Integers, part: int | Integers) -> Integers:
    """Return the number of a slot; numbers ascend over all slots of a rank, and from rank to rank.

    `number` is of the compute action, counted over all ranks, or one behind a rank's last; `part` one of its four slots.
    """
    return 4 * (number + rank) + part


def _operations(graph: Graph) -> tuple[Op, ...]:
    ops = {Op.FREE, Op.REDUCE, *graph.columns.ops}
    for _, _, carries in graph.transfers.links:
        ops |= {carries.op} if isinstance(carries, Collective) else {carries.send, carries.receive}
    return tuple(sorted(ops))


def _messages(graph: Graph, moments: _Moments, ops: Sequence[Op]) -> _Posted:
    """Both sides of every message, due at the end of its producer; streams are numbered by their first messages."""
    transfers, rank_of = graph.transfers, graph.columns.ranks()
    sides = [
        (-1, -1) if isinstance(of, Collective) else (ops.index(of.send), ops.index(of.receive)) for *_, of in transfers.links
    ]
    send, receive = np.array([*sides, (-1, -1)])[transfers.link].T
    (is_message,) = np.nonzero(send >= 0)
    send, receive, producer = send[is_message], receive[is_message], transfers.producer[is_message]
    rank, to_rank = rank_of[producer], rank_of[transfers.consumer[is_message]]
    stream = _by_first((send * graph.num_ranks + rank) * graph.num_ranks + to_rank)
    return _Posted(
        np.append(rank, to_rank),
        np.tile(moments.end[producer], 2),  # one moment for both sides: no cycle can go through a send and its receive
        np.tile(stream, 2),
        np.append(send, receive),
        np.append(transfers.source_site[is_message], transfers.target_site[is_message]),
        np.tile(transfers.chunk[is_message], 2),
    )


def _collectives(graph: Graph, moments: _Moments, ops: Sequence[Op]) -> _Posted:
    """Every collective on every rank, due at the end of the last action that gives to it."""
    transfers = graph.transfers
    kind = np.array([ops.index(of.op) if isinstance(of, Collective) else -1 for *_, of in transfers.links] + [-1])
    (gives,) = np.nonzero(kind[transfers.link] >= 0)
    num_chunks = 1 + transfers.chunk.max(initial=0)
    keys, which = np.unique(kind[transfers.link[gives]] * num_chunks + transfers.chunk[gives], return_inverse=True)
    due = np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(due, which, moments.end[transfers.producer[gives]])
    op, chunk = np.divmod(keys, num_chunks)
    number = np.zeros(len(ops), dtype=np.int64)
    number[kind[transfers.link[gives]]] = _by_first(kind[transfers.link[gives]])
    ranks = np.arange(graph.num_ranks)
    each = np.repeat(np.arange(len(keys)), len(ranks))
    stream = len(transfers.link) + number[op]  # after all streams of messages
    return _Posted(*(np.tile(ranks, len(keys)), due[each], stream[each], op[each], np.tile(ranks, len(keys)), chunk[each]))


def _by_first(keys: Integers) -> Integers:
    """Number distinct keys in the order in which they first occur."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]


def _reductions(plan: Plan, graph: Graph, moments: _Moments, ops: Sequence[Op]) -> _Posted:
    """Reductions of all stages, last stage first: each after its stage's last gradient and the reductions of later stages.

    Gradients of what a rank has besides its stages are reduced with its first stage.
    """
    columns, rank_of = graph.columns, graph.columns.ranks()
    kinds = [operation(op) for op in columns.ops]
    gives = np.array([kind.gives_gradients for kind in kinds], dtype=bool)[columns.op]
    gives &= columns.step < columns.num_compute
    is_of_stage = np.array([kind.sites is of_stages for kind in kinds], dtype=bool)[columns.op]
    first_stage = np.array([plan.placement.index(rank) if rank in plan.placement else 0 for rank in range(plan.num_ranks)])
    stage = np.where(is_of_stage, columns.site, first_stage[rank_of[columns.step]])[gives]
    last = np.full(plan.num_stages, -1)
    np.maximum.at(last, stage, np.flatnonzero(gives))
    rows, due = [], 0
    for behind, at in enumerate(range(plan.num_stages - 1, -1, -1)):
        if last[at] >= 0:
            due = max(due, int(moments.end[columns.step[last[at]]]))
            # In the room behind a moment that `_Moments.of` leaves, one place for each stage: reductions due at one moment
            # keep the same order on all ranks and replicas.
            rows.append((plan.placement[at], due + 1 + behind, -at, ops.index(Op.REDUCE), at, columns.chunk[last[at]]))
    return _Posted(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)


def _sorted(*posted: _Posted) -> _Posted:
    """Join and sort by rank and moment; at one moment by stream, and at one moment of a stream by action."""
    joined = _Posted(*map(np.concatenate, zip(*posted, strict=True)))
    # Both sides of a message have one moment and one stream, so sender and receiver sort the messages between them alike. They
    # have no tags: the n-th receive takes the n-th message.
    key = joined.stream - joined.stream.min(initial=0)
    for column in (joined.op, joined.site, joined.chunk):
        key = key * (1 + column.max(initial=0)) + column
    order = np.lexsort((key, joined.due, joined.rank))
    return _Posted(*(column[order] for column in joined))


def _slots_of_posted(graph: Graph, moments: _Moments, posted: _Posted) -> _Slots:
    rank = graph.columns.ranks()[: graph.columns.num_compute]
    starts, ends = rank * moments.most + moments.start, rank * moments.most + moments.end  # both ascend
    due = posted.rank * moments.most + posted.due
    number = np.searchsorted(ends, due, side="right")  # the first action that ends later, maybe of another rank
    stops = np.array([numbers.stop for numbers in graph.tracks[: graph.num_ranks]], dtype=np.int64)
    (during,) = np.nonzero((number < stops[posted.rank]) & (np.append(starts, 0)[number] <= due))
    behind = _is_behind_second(number[during], posted.stream[during])
    part = np.full(len(due), _DUE_BEFORE)
    part[during[~behind]] = _OVERLAPPED
    # From the second of a stream on they are launched behind the action. A stream runs its launches one after the other, so the
    # second waits for the first; with one hardware queue an action launched after it would wait for both.
    number[during[behind]] += 1
    return _Slots(_slot(posted.rank, number, part), posted.op, posted.site, posted.chunk)


def _is_behind_second(number: Integers, stream: Integers) -> Booleans:
    """True from the second entry of one stream on, in each group of entries; groups have ascending numbers."""
    keys = number * (1 + np.ptp(stream)) + stream if len(stream) else number
    is_second = np.ones(len(number), dtype=bool)
    is_second[np.unique(keys, return_index=True)[1]] = False
    seen = np.cumsum(is_second)
    before = np.append(0, seen)[np.searchsorted(number, number)]
    return seen > before


def _slots_of_compute(graph: Graph, ops: Sequence[Op]) -> _Slots:
    columns, (at,) = graph.columns, np.nonzero(graph.columns.step < graph.columns.num_compute)
    codes, step = np.array([ops.index(op) for op in columns.ops], dtype=np.int64), columns.step[at]
    return _Slots(_slot(columns.ranks()[step], step, _COMPUTE), codes[columns.op[at]], columns.site[at], columns.chunk[at])


def _slots_of_copies(graph: Graph, played: Playback, ops: Sequence[Op]) -> _Slots:
    rows = [
        (4 * (numbers[index] + rank) + _COPIES, ops.index(action.op), action.stage, action.chunk)
        for rank, numbers in enumerate(graph.tracks[: graph.num_ranks])
        for index, actions in place_copies(graph, played.start_us, played.end_us, rank).items()
        if index < len(numbers)
        for action in actions
    ]
    return _Slots(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)
