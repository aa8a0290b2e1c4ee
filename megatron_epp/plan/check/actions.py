"""The part of `check` for actions: each occurs once, in a possible order, and messages do not cross."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan.action import COMPUTE_OPS, COPY_OPS, LOWERED_OPS, Action, Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.graph import Graph
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulate import Playback


def check_presence(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless every forward and backward occurs exactly once and on its stage's rank, optional actions are
    complete, and no action is unknown.
    """
    seen: dict[Action, tuple[int, int]] = {}
    for in_copies, table in plan.tables:
        for rank, steps in enumerate(table):
            for position, step in enumerate(steps):
                action = step.action
                reason = _foreign(plan, rank, action, in_copies)
                if not reason and action in seen:
                    first_rank, first = seen[action]
                    reason = f"doubled: already at rank {first_rank} position {first}"
                if reason:
                    yield Violation(rank, position, action, reason, in_copies)
                if action.op in (COPY_OPS if in_copies else COMPUTE_OPS):
                    seen.setdefault(action, (rank, position))
    for op in (Op.F,) if plan.forward_only else (Op.F, Op.B):
        for stage, rank in enumerate(plan.placement):
            for c in range(len(plan.chunks)):
                if (action := Action(op, stage, c)) not in seen:
                    yield Violation(rank, None, action, f"missing: stage {stage} never runs {op.value} of chunk {c}")
    yield from _offloads(plan, seen)
    for rank, copies in enumerate(plan.copies):
        for position, copy in enumerate(copies):
            if copy.after is not None and (copy.after.op in COPY_OPS or seen.get(copy.after, (-1, 0))[0] != rank):
                reason = f"is issued after {copy.after}, which the compute list of its rank does not have"
                yield Violation(rank, position, copy.action, reason, in_copies=True)


def _foreign(plan: Plan, rank: int, action: Action, in_copies: bool) -> str:
    """Reason for which an action may not be in its list; empty if it may."""
    op, stage, chunk = action
    if op in LOWERED_OPS:
        return "a send, receive or release has no place in a plan: lowering adds them"
    if op not in (COPY_OPS if in_copies else COMPUTE_OPS):
        return f"{op.value} belongs into {'the compute list' if in_copies else 'the copies'} of its rank"
    if not 0 <= stage < plan.num_stages:
        return f"unknown stage {stage}; there are {plan.num_stages}"
    if not 0 <= chunk < len(plan.chunks):
        return f"unknown chunk {chunk}; there are {len(plan.chunks)}"
    if plan.placement[stage] != rank:
        return f"wrong rank: stage {stage} is placed on rank {plan.placement[stage]}"
    if plan.forward_only and op is not Op.F:
        return "a forward-only plan holds nothing but F"
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
    """Find actions listed before one that they need, and cycles across the lists, which are deadlocks."""
    faults = []
    ranks = plan.num_ranks
    for track, numbers in enumerate(graph.tracks):
        for number in numbers:
            for need, _ in graph.needs[number]:
                if need > number and need in numbers:
                    action, other = graph.steps[number].action, graph.steps[need].action
                    reason = f"runs before {other} (position {need - numbers.start}), which it needs{_because(action, other)}"
                    faults.append(Violation(track % ranks, number - numbers.start, action, reason, track >= ranks))
    return faults or [_deadlock(graph, number, need) for number, need in played.blocked]


def _because(action: Action, need: Action) -> str:
    if need.op is not action.op or need.stage != action.stage:
        return ""
    if action.op is Op.F:
        return f": chunk {action.chunk} attends to the slice in chunk {need.chunk}"
    return f": the slice in chunk {need.chunk} comes later and adds to the gradient of keys and values of chunk {action.chunk}"


def _deadlock(graph: Graph, number: int, need: int) -> Violation:
    rank, position = graph.where(number)
    other_rank, other = graph.where(need)
    reason = f"deadlock: waits for {graph.steps[need].action} (rank {other_rank}, position {other}), which is never reached"
    return Violation(rank, position, graph.steps[number].action, reason, number >= graph.tracks[graph.num_ranks].start)


def check_links(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless, at every boundary between ranks, the receiver takes chunks in the order of the sender.

    Messages of one boundary never overtake each other: one that did would wait in memory that no step accounts for.
    Boundaries that share a link (looped placements put several on one) may interleave differently on both sides; lowering
    then receives in the order of the sends.
    """
    order: dict[tuple[Op, int], list[tuple[int, int]]] = {}
    for steps in plan.ranks:
        for position, step in enumerate(steps):
            order.setdefault((step.action.op, step.action.stage), []).append((step.action.chunk, position))
    stages = range(plan.num_stages - 1)
    for op, src, dst in (*((Op.F, s, s + 1) for s in stages), *((Op.B, s + 1, s) for s in stages)):
        if plan.placement[src] == plan.placement[dst]:
            continue
        for (sent, at), (taken, position) in zip(order.get((op, src), []), order.get((op, dst), []), strict=True):
            if sent != taken:
                src_rank, dst_rank = plan.placement[src], plan.placement[dst]
                reason = (
                    f"crossed: takes chunk {taken} while rank {src_rank} sends chunk {sent} first (position {at}) "
                    f"on the link from rank {src_rank} to rank {dst_rank}"
                )
                yield Violation(dst_rank, position, Action(op, dst, taken), reason)
                break
