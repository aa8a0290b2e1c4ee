"""Memory set aside for messages in flight. A plan's order decides how much it needs, so planning may be repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.infeasible import infeasible

ROUNDS = 8
"""Plans tried with ever more memory set aside. Needs of successive plans differ little: two are enough nearly always."""
_SLOTS_PER_DIRECTION = 2
"""Slots that a direction to or from a rank is expected to have: as many as `SEND_SLOTS` for sends. It has more where messages
come long before they are needed; then the batch is planned again with room for them.
"""
_MESSAGES_IN_USE = 2
"""Messages of a rank that are expected outside of slots: one that is being made, and one that is in use."""
_MARGIN_DIVISOR = 8
"""One part in so many more than a plan needed is set aside for the next one, whose order may differ a little. With 2 two plans
of 70 were refused and two slower; with 64 two were faster, by up to 0.2 %.
"""


class MessageRoomError(PlanError):
    """A plan fits its caps but for its messages in flight, `needed` bytes of every rank."""

    def __init__(self, message: str, needed: tuple[int, ...]) -> None:
        super().__init__(message)
        self.needed = needed


def message_room(problem: Problem, message_bytes: Sequence[int]) -> tuple[int, ...]:
    """Bytes to set aside on every rank while the order is not known: as the problem says, or for the largest chunk."""
    if problem.message_bytes:
        return problem.message_bytes
    ends = Counter(rank for direction in directions(problem.placement) for rank in (direction.sender, direction.receiver))
    expected = (_SLOTS_PER_DIRECTION * ends[rank] + _MESSAGES_IN_USE * (rank in ends) for rank in range(problem.num_ranks))
    return tuple(number * max(message_bytes, default=0) for number in expected)


def with_room[T](problem: Problem, make: Callable[[Problem], T]) -> T:
    """Plan, and plan again with more memory set aside for messages where a plan's own need more than its caps leave. Raises
    what `make` raises: `InfeasibleError`, whose cap need not have room for messages, or the last `MessageRoomError`.
    """
    for _ in range(ROUNDS - 1):
        try:
            return make(problem)
        except MessageRoomError as short:
            before = problem.message_bytes or (0,) * problem.num_ranks
            problem = replace(problem, message_bytes=room_for(before, short.needed))
    return make(problem)


def planned_with_room[T](problem: Problem, costs: Costs, options: Options, make: Callable[[Problem], T]) -> T:
    """Plan with room for messages. Raises `InfeasibleError` with a cap that has room for the messages of a plan."""
    try:
        return with_room(problem, make)
    except InfeasibleError as error:
        cap = error.least_cap_bytes
        if cap and (proven := proven_cap(cap, lambda tried: with_room(raised(problem, tried), make))) > cap:
            raise infeasible(problem, costs, options, proven) from None
        raise


def proven_cap(cap_bytes: int, plan_under: Callable[[int], object]) -> int:
    """Return the first cap, from one on, under which a plan is made: its messages may need more than was counted."""
    for number in range(2 * ROUNDS):
        try:
            plan_under(cap_bytes)
        except InfeasibleError as error:  # a named cap may be short by ever less, so each step is longer
            least = cap_bytes + max(error.least_cap_bytes <= cap_bytes, number) * cap_bytes // 64
            cap_bytes = max(error.least_cap_bytes, least)
        except MessageRoomError:
            cap_bytes += cap_bytes // 64
        else:
            break
    return cap_bytes


def raised(problem: Problem, cap_bytes: int) -> Problem:
    return replace(problem, cap_bytes=tuple(max(cap, cap_bytes) for cap in problem.cap_bytes))


def room_for(before: Sequence[int], needed: Sequence[int]) -> tuple[int, ...]:
    """Return bytes of every rank to set aside for a plan like one whose messages need so much, and no less than before."""
    return tuple(max(own, size + size // _MARGIN_DIVISOR) for own, size in zip(before, needed, strict=True))
