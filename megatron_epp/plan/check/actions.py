"""The part of `check` for actions: each occurs once, in a possible order, and messages do not cross."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.graph import Graph
from megatron_epp.plan.operations import (
    ANYWHERE,
    Message,
    Presence,
    Role,
    Track,
    is_compute,
    is_defined,
    needs_of,
    of_stages,
    operation,
    operations,
)
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulate import Playback


def check_presence(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless every forward and backward occurs exactly once and on its stage's rank, optional actions are
    complete, and no action is unknown.
    """
    seen: dict[Action, tuple[int, int]] = {}
    for in_copies, table in plan.tables:
        kinds: dict[Op, _Kind] = {}
        for rank, steps in enumerate(table):
            for position, step in enumerate(steps):
                for action in step.actions:
                    kind = kinds.get(action.op)
                    if kind is None:
                        kind = kinds[action.op] = _Kind.of(plan, action.op, in_copies)
                    reason = kind.foreign or kind.misplaced(plan, rank, action)
                    if not reason and action in seen:
                        first_rank, first = seen[action]
                        reason = f"doubled: already at rank {first_rank} position {first}"
                    if reason:
                        yield Violation(rank, position, action, reason, in_copies)
                    if kind.is_listed:
                        seen.setdefault(action, (rank, position))
    yield from _missing(plan, seen)
    yield from _offloads(plan, seen)
    for rank, copies in enumerate(plan.copies):
        for position, copy in enumerate(copies):
            after = copy.after
            if after is not None and (seen.get(after, (-1, 0))[0] != rank or not is_compute(after.op)):
                reason = f"is issued after {copy.after}, which the compute list of its rank does not have"
                yield Violation(rank, position, copy.action, reason, in_copies=True)


def _missing(plan: Plan, seen: Mapping[Action, tuple[int, int]]) -> Iterator[Violation]:
    """Yield a violation for each action that a plan must have and does not have."""
    present = {action.op for action in seen}
    present |= {op for kind in operations() if kind.op in present for op in kind.together}
    always = {Presence.ALWAYS}
    complete = {Presence.COMPLETE_ALWAYS}
    if not plan.forward_only:
        always.add(Presence.TRAINING)
        complete.add(Presence.COMPLETE)
    for kind in operations():
        if kind.presence not in always and not (kind.presence in complete and kind.op in present):
            continue
        site = "stage" if kind.sites is of_stages else "site"
        for index, rank in enumerate(kind.sites(plan.placement)):
            for c in range(len(plan.chunks)):
                if (action := Action(kind.op, index, c)) not in seen:
                    on = None if rank == ANYWHERE else rank
                    yield Violation(on, None, action, f"missing: {site} {index} never runs {kind.op} of chunk {c}")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of action in a list of the plan.

    Attributes:
        foreign: reason for which it may not be in the list; empty if it may.
        is_listed: it is of the list's track.
        ranks: the rank of each of its sites.
        site: word for a site.
    """

    foreign: str
    is_listed: bool = False
    ranks: Sequence[int] = ()
    site: str = ""

    @classmethod
    def of(cls, plan: Plan, op: Op, in_copies: bool) -> _Kind:
        """Look up a kind for the compute lists, or for the copies."""
        if not is_defined(op):
            return cls(f"operation {op} has no definition")
        kind = operation(op)
        if kind.track is Track.LOWERED:
            return cls("a send, receive or release has no place in a plan: lowering adds them")
        if kind.track is not (Track.COPY if in_copies else Track.COMPUTE):
            return cls(f"{op} belongs into {'the compute list' if in_copies else 'the copies'} of its rank")
        return cls("", True, kind.sites(plan.placement), "stage" if kind.sites is of_stages else "site")

    def misplaced(self, plan: Plan, rank: int, action: Action) -> str:
        """Reason for which an action may not be on a rank; empty if it may."""
        op, index, chunk = action
        if not 0 <= index < len(self.ranks):
            return f"unknown {self.site} {index}; there are {len(self.ranks)}"
        if not 0 <= chunk < len(plan.chunks):
            return f"unknown chunk {chunk}; there are {len(plan.chunks)}"
        if self.ranks[index] not in (rank, ANYWHERE):
            return f"wrong rank: {self.site} {index} is placed on rank {self.ranks[index]}"
        if plan.forward_only and operation(op).presence not in (Presence.ALWAYS, Presence.COMPLETE_ALWAYS):
            return "a forward-only plan holds forwards, and vocabulary shards with their losses, and nothing else"
        return ""


def _offloads(plan: Plan, seen: dict[Action, tuple[int, int]]) -> Iterator[Violation]:
    """Yield violations unless offload and load occur together and exactly with a share above zero."""
    has_copies = any(plan.copies)
    for stage, shares in enumerate(plan.offload_share):
        for c, share in enumerate(shares):
            if share == 0 and not has_copies:
                continue
            for op in (Op.O, Op.L):
                action = Action(op, stage, c)
                if share > 0 and action not in seen:
                    yield Violation(plan.placement[stage], None, action, f"missing: the offload share of chunk {c} is {share}")
                elif share == 0 and action in seen:
                    reason = f"the offload share of chunk {c} at stage {stage} is 0"
                    yield Violation(*seen[action], action, reason, in_copies=True)


def check_order(plan: Plan, graph: Graph, played: Playback) -> list[Violation]:
    """Find actions listed before one that they need, or on another rank than what they need that nothing carries, and cycles
    across the lists, which are deadlocks.
    """
    faults = []
    ranks = plan.num_ranks
    for track, numbers in enumerate(graph.tracks):
        for number in numbers:
            for need, _ in graph.needs[number]:
                if need > number and need in numbers:
                    action, other = graph.steps[number].action, graph.steps[need].action
                    reason = f"runs before {other} (position {need - numbers.start}), which it needs{_because(action, other)}"
                    faults.append(Violation(track % ranks, number - numbers.start, action, reason, track >= ranks))
    return faults or list(_not_carried(graph)) or [_deadlock(graph, number, need) for number, need in played.blocked]


def _not_carried(graph: Graph) -> Iterator[Violation]:
    """Yield a violation for each action that may run anywhere, and needs what another keeps on its own rank."""
    free = {kind.op for kind in operations(Track.COMPUTE) if ANYWHERE in kind.sites((0, 0))}
    ranks = [graph.where(numbers.start)[0] if numbers else 0 for numbers in graph.tracks]
    rank_of = [rank for rank, numbers in zip(ranks, graph.tracks, strict=True) for _ in numbers]
    moved = {(transfer.producer, transfer.consumer) for transfer in graph.transfers}
    for number, step in enumerate(graph.steps):
        if step.action.op not in free:
            continue
        for need, _ in graph.needs[number]:
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
    return Violation(rank, position, graph.steps[number].action, reason, number >= graph.tracks[graph.num_ranks].start)


def check_links(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless, at every boundary between ranks, the receiver takes chunks in the order of the sender.

    Messages of one boundary never overtake each other: one that did would wait in memory that no step accounts for.
    Boundaries that share a link (looped placements put several on one) may interleave differently on both sides; lowering
    then receives in the order of the sends.
    """
    order: dict[tuple[Op, int], list[tuple[int, int, int]]] = {}
    for rank, steps in enumerate(plan.ranks):
        for position, step in enumerate(steps):
            for op, stage, chunk in step.actions:
                order.setdefault((op, stage), []).append((chunk, rank, position))
    for kind in operations(Track.COMPUTE):
        for need in needs_of(kind.op):
            if not isinstance(need.carries, Message) or not isinstance(need.site, int):
                continue
            for dst in range(len(kind.sites(plan.placement))):
                sent, taken = order.get((need.op, dst + need.site), []), order.get((kind.op, dst), [])
                if sent and taken:
                    yield from _crossed(sent, taken, Action(kind.op, dst, 0))


def _crossed(
    sent: Sequence[tuple[int, int, int]], taken: Sequence[tuple[int, int, int]], receiver: Action
) -> Iterator[Violation]:
    """Yield a violation for the first chunk on each link of a boundary that is taken in another order than it is sent.

    Args:
        sent, taken: chunks of both sides in their order, each with its rank and position.
        receiver: operation and site of the side that takes.
    """
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
