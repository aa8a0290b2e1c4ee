"""The part of `check` for actions: each occurs once, in a possible order, and messages do not cross."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import NO_STEP, Integers, Listed, PlanColumns
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.graph import Graph
from megatron_epp.plan.operations import ANYWHERE, MessageKind, Presence, Role, Track, needs_of, operation, operations
from megatron_epp.plan.plan import Copy, Plan
from megatron_epp.plan.proof.memory_balance import site_name
from megatron_epp.plan.simulation import Playback
from megatron_epp.plan.violation import Violation


def check_presence(plan: Plan, columns: PlanColumns, steps: Listed) -> Iterator[Violation]:
    """Yield violations unless every forward and backward occurs exactly once and on its stage's rank, optional actions are
    complete, and no action is unknown. `check_tables` must have found nothing.
    """
    wrong = np.union1d(_misplaced(plan, columns, steps), np.append(steps.unknown, steps.repeated))
    first = _first_positions(columns, steps) if len(steps.repeated) else {}
    for index in wrong.tolist():
        number, action = int(columns.step[index]), columns.action(index)
        rank, position = columns.where(number)
        in_copies = number >= columns.num_compute
        if not (reason := _misplacement(plan, rank, action, in_copies)):
            first_rank, at = first[action]
            reason = f"doubled: already at rank {first_rank} position {at}"
        yield Violation(rank, position, action, reason, in_copies)
    yield from _missing(plan, steps)
    yield from _offloads(plan, columns, steps)
    for number in range(columns.num_compute, len(columns.steps)):
        copy = columns.steps[number]
        if isinstance(copy, Copy) and (after := copy.after) is not None:
            rank, position = columns.where(number)
            needed = steps.number(after)
            if needed is None or columns.where(needed)[0] != rank or operation(after.op).track is not Track.COMPUTE:
                reason = f"is issued after {after}, which the compute list of its rank does not have"
                yield Violation(rank, position, copy.action, reason, in_copies=True)


def _misplaced(plan: Plan, columns: PlanColumns, steps: Listed) -> Integers:
    """Indices of actions that may not be on their rank. Each operation, site and track is looked up once."""
    known = np.delete(np.arange(len(columns.op)), steps.unknown)
    num_sites = 1 + int(columns.site[known].max(initial=0))
    tracks = np.repeat(np.arange(len(columns.tracks)), list(map(len, columns.tracks)))
    keys = (tracks[columns.step[known]] * len(columns.ops) + columns.op[known]) * num_sites + columns.site[known]
    wrong = []
    for key in np.unique(keys).tolist():
        group, site = divmod(key, num_sites)
        track, op = divmod(group, len(columns.ops))
        if _misplacement(plan, track % plan.num_ranks, Action(columns.ops[op], site, 0), track >= plan.num_ranks):
            wrong.append(key)
    return known[np.isin(keys, wrong)] if wrong else known[:0]


def _first_positions(columns: PlanColumns, steps: Listed) -> dict[Action, tuple[int, int]]:
    positions: dict[Action, tuple[int, int]] = {}
    unknown = set(steps.unknown.tolist())
    for index in range(len(columns.op)):
        if index not in unknown:
            positions.setdefault(columns.action(index), columns.where(int(columns.step[index])))
    return positions


def _missing(plan: Plan, steps: Listed) -> Iterator[Violation]:
    present = {*steps.ops, *(op for kind in operations() if kind.op in steps.ops for op in kind.together)}
    always = {Presence.ALWAYS}
    complete = {Presence.COMPLETE_ALWAYS}
    if not plan.forward_only:
        always.add(Presence.TRAINING)
        complete.add(Presence.COMPLETE)
    for kind in operations():
        if kind.presence not in always and not (kind.presence in complete and kind.op in present):
            continue
        site, ranks = site_name(kind.op), kind.sites(plan.placement)
        for index, c in np.argwhere(steps.table(kind.op, len(ranks), len(plan.chunks)) == NO_STEP).tolist():
            on = None if ranks[index] == ANYWHERE else ranks[index]
            yield Violation(on, None, Action(kind.op, index, c), f"missing: {site} {index} never runs {kind.op} of chunk {c}")


def _misplacement(plan: Plan, rank: int, action: Action, in_copies: bool) -> str:
    """Return the reason for which an action may not be in a list of a rank; empty if it may."""
    op, index, chunk = action
    try:
        kind = operation(op)
    except PlanError:
        return f"operation {op} has no definition"
    if kind.track is Track.LOWERED:
        return "a send, receive or release has no place in a plan: lowering adds them"
    if kind.track is not (Track.COPY if in_copies else Track.COMPUTE):
        return f"{op} belongs into {'the compute list' if in_copies else 'the copies'} of its rank"
    ranks, site = kind.sites(plan.placement), site_name(op)
    if not 0 <= index < len(ranks):
        return f"unknown {site} {index}; there are {len(ranks)}"
    if not 0 <= chunk < len(plan.chunks):
        return f"unknown chunk {chunk}; there are {len(plan.chunks)}"
    if ranks[index] not in (rank, ANYWHERE):
        return f"wrong rank: {site} {index} is placed on rank {ranks[index]}"
    if plan.forward_only and kind.presence not in (Presence.ALWAYS, Presence.COMPLETE_ALWAYS):
        return "a forward-only plan holds forwards, and vocabulary shards with their losses, and nothing else"
    return ""


def _offloads(plan: Plan, columns: PlanColumns, steps: Listed) -> Iterator[Violation]:
    """Yield violations unless offload and load occur together and exactly with a share above zero."""
    is_shared, both = np.array(plan.offload_share) > 0, (Op.O, Op.L)
    tables = [steps.table(op, plan.num_stages, len(plan.chunks)) for op in both]
    wrong = np.stack([(table != NO_STEP) != is_shared for table in tables], axis=-1)
    for stage, c, at in np.argwhere(wrong).tolist():
        action = Action(both[at], stage, c)
        if is_shared[stage, c]:
            reason = f"missing: the offload share of chunk {c} is {plan.offload_share[stage][c]}"
            yield Violation(plan.placement[stage], None, action, reason)
        else:
            reason = f"the offload share of chunk {c} at stage {stage} is 0"
            yield Violation(*columns.where(int(tables[at][stage, c])), action, reason, in_copies=True)


def check_order(graph: Graph, played: Playback) -> list[Violation]:
    """Find actions listed before one that they need, or on another rank than what they need that nothing carries, and cycles
    across the lists, which are deadlocks.
    """
    faults, columns = [], graph.columns
    tracks = np.repeat(np.arange(len(graph.tracks)), list(map(len, graph.tracks)))
    numbers = np.repeat(np.arange(len(graph.steps)), np.diff(graph.need_starts))
    for at in np.flatnonzero((graph.needs > numbers) & (tracks[graph.needs] == tracks[numbers])).tolist():
        number, need = int(numbers[at]), int(graph.needs[at])
        action, other = graph.steps[number].action, graph.steps[need].action
        rank, position = graph.where(number)
        reason = f"runs before {other} (position {graph.where(need)[1]}), which it needs{_because(action, other)}"
        faults.append(Violation(rank, position, action, reason, number >= columns.num_compute))
    return faults or list(_not_carried(graph)) or [_deadlock(graph, number, need) for number, need in played.blocked]


def _not_carried(graph: Graph) -> Iterator[Violation]:
    """Yield a violation for each action that may run anywhere, and needs what another keeps on its own rank."""
    free = {kind.op for kind in operations(Track.COMPUTE) if ANYWHERE in kind.sites((0, 0))}
    if free.isdisjoint(graph.columns.ops):
        return
    rank_of = graph.columns.ranks().tolist()
    moved = set(zip(graph.transfers.producer.tolist(), graph.transfers.consumer.tolist(), strict=True))
    for number, step in enumerate(graph.steps):
        if step.action.op not in free:
            continue
        for need, _ in graph.needs_of(number):
            if rank_of[need] != rank_of[number] and (need, number) not in moved:
                reason = f"needs what {graph.steps[need].action} keeps on rank {rank_of[need]}"
                yield Violation(*graph.where(number), step.action, reason)


def _because(action: Action, need: Action) -> str:
    if need.op is not action.op or need.stage != action.stage:
        return ""
    if operation(action.op).role is Role.OPENS:
        return f": chunk {action.chunk} attends to the slice in chunk {need.chunk}"
    return f": the slice in chunk {need.chunk} comes later and adds to the gradient of keys and values of chunk {action.chunk}"


def _deadlock(graph: Graph, number: int, need: int) -> Violation:
    rank, position = graph.where(number)
    other_rank, other = graph.where(need)
    if need == number:
        reason = "one action of its step needs the other, and all actions of a step begin together"
        return Violation(rank, position, graph.steps[number].action, reason)
    reason = f"deadlock: waits for {graph.steps[need].action} (rank {other_rank}, position {other}), which is never reached"
    return Violation(rank, position, graph.steps[number].action, reason, number >= graph.columns.num_compute)


def check_links(columns: PlanColumns, steps: Listed) -> Iterator[Violation]:
    """Yield violations unless, at every boundary between ranks, the receiver takes chunks in the order of the sender.

    One message that overtook another would wait in memory that no step accounts for. Boundaries that share a link, as in looped
    placements, may interleave differently on both sides; lowering then receives as sent. `check_presence` must have found
    nothing.
    """
    for kind in operations(Track.COMPUTE):
        for need in needs_of(kind.op):
            sends, takes = steps.numbers.get(need.op), steps.numbers.get(kind.op)
            if not isinstance(need.carries, MessageKind) or not isinstance(need.site, int) or sends is None or takes is None:
                continue
            sites = [dst for dst in range(len(takes)) if 0 <= dst + need.site < len(sends)]
            sent, taken = sends[[dst + need.site for dst in sites]], takes[sites]
            in_order = np.take_along_axis(sent, np.argsort(taken, axis=1), axis=1)
            is_equal = (in_order >= 0).all(axis=1) & (taken >= 0).all(axis=1) & (np.diff(in_order, axis=1) > 0).all(axis=1)
            for dst, equal in zip(sites, is_equal.tolist(), strict=True):
                if not equal:  # several boundaries of these sites, or of equal steps, may still have equal orders each
                    sides = _chunks_of(columns, need.op, dst + need.site), _chunks_of(columns, kind.op, dst)
                    yield from _crossed(*sides, Action(kind.op, dst, 0))


def _chunks_of(columns: PlanColumns, op: Op, site: int) -> list[tuple[int, int, int]]:
    """Chunk, rank and position of an operation's actions at a site, in the order of the lists."""
    actions = columns.of(op)
    actions = actions[columns.site[actions] == site]
    return [(int(columns.chunk[index]), *columns.where(int(columns.step[index]))) for index in actions.tolist()]


def _crossed(
    sent: Sequence[tuple[int, int, int]], taken: Sequence[tuple[int, int, int]], receiver: Action
) -> Iterator[Violation]:
    """Yield a violation for the first chunk on each link of a boundary that is taken in another order than it is sent."""
    source = {chunk: (rank, position) for chunk, rank, position in sent}
    target = {chunk: rank for chunk, rank, _ in taken}
    queues: dict[tuple[int, int], list[int]] = {}
    for chunk, rank, _ in sent:
        queues.setdefault((rank, target.get(chunk, rank)), []).append(chunk)
    at, faulty = dict.fromkeys(queues, 0), set[tuple[int, int]]()
    for chunk, rank, position in taken:
        link = source[chunk][0], rank
        if link[0] == rank or link in faulty:
            continue
        leaves = queues[link][at[link]]
        at[link] += 1
        if leaves != chunk:
            faulty.add(link)
            reason = (
                f"crossed: takes chunk {chunk} while rank {link[0]} sends chunk {leaves} first (position {source[leaves][1]}) "
                f"on the link from rank {link[0]} to rank {rank}"
            )
            yield Violation(rank, position, receiver._replace(chunk=chunk), reason)
