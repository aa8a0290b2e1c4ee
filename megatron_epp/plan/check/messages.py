"""The part of `check` for launches with sends and receives of their own: all are there, in a possible order on their rank."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.launches import Rows
from megatron_epp.plan.operations import MessageKind, Parties, Track, needs_of, operation, operations
from megatron_epp.plan.plan import Plan


def check_own_messages(plan: Plan, lowered: Rows, rows: Rows) -> Iterator[Violation]:
    """Yield a violation for each message of a rank that is missing, doubled, unknown, or launched too early or too late.

    Args:
        lowered: the plan with the messages that it needs, of every rank.
        rows: what ranks launch, of every rank: the plan's compute actions and messages.
    """
    takers = dict(_takers())
    for rank, (needed, row) in enumerate(zip(lowered, rows, strict=True)):
        wanted, at = {action for action in needed if _is_message(action.op)}, dict[Action, int]()
        for position, action in enumerate(row):
            if _is_message(action.op) and (action not in wanted or action in at):
                why = f"doubled: already at launch {at[action]}" if action in at else "no stage needs this message of the rank"
                yield Violation(rank, None, action, f"{why} (launch {position})")
            at.setdefault(action, position)
        for action in sorted(wanted - at.keys()):
            yield Violation(rank, None, action, f"missing: the rank never launches this {operation(action.op).text}")
        for action in sorted(wanted & at.keys()):
            taker = takers.get(action.op)
            first, second = (action, action._replace(op=taker)) if taker else (_maker(action), action)
            if second in at and at[second] < at[first]:
                yield Violation(
                    rank, None, second, f"is launched at {at[second]}, before {first} (launch {at[first]}), which it needs"
                )


def _is_message(op: Op) -> bool:
    side = operation(op).side
    return side is not None and side.parties is Parties.PAIR


def _maker(send: Action) -> Action:
    """Return the action whose result a send carries."""
    (need,) = operation(send.op).needs
    return send._replace(op=need.op)


def _takers() -> Iterator[tuple[Op, Op]]:
    """Yield receives, each with the operation of the same site that needs what it receives."""
    for kind in operations(Track.COMPUTE):
        for need in needs_of(kind.op):
            if isinstance(need.carries, MessageKind):
                yield need.carries.receive, kind.op
