"""Memory set aside for messages in flight. A plan's order decides how much it needs, so planning may be repeated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.ways import ways
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.work import limited

MOST_WORK = 500_000
"""Steps of work of a search that found nothing up to which others look for the smallest cap, each for a second or two."""
ROUNDS = 8
"""Plans tried with ever more memory set aside. Needs of successive plans differ little: two are enough nearly always."""
_PER_WAY = 2
"""Slots that a way to or from a rank is expected to have: as many as `SEND_SLOTS` for sends. It has more where messages come
long before they are needed; then the batch is planned again with room for them.
"""
_IN_USE = 2
"""Messages of a rank that are expected outside of slots: one that is being made, and one that is in use."""
_SLACK = 8
"""One part in so many more than a plan needed is set aside for the next one, whose order may differ a little. With 2 two plans
of 70 were refused and two slower; with 64 two were faster, by up to 0.2 % (see `search.grains`).
"""


class MessageRoomError(PlanError):
    """A plan fits its caps but for its messages in flight.

    Attributes:
        needed: bytes of messages of every rank.
    """

    def __init__(self, message: str, needed: tuple[int, ...]) -> None:
        super().__init__(message)
        self.needed = needed


def message_room(problem: Problem, message_bytes: Sequence[int]) -> tuple[int, ...]:
    """Bytes to set aside on every rank while the order is not known: as the problem says, or for the largest chunk.

    Args:
        problem: what is to be planned.
        message_bytes: of every chunk.
    """
    if problem.message_bytes:
        return problem.message_bytes
    ends = Counter(rank for way in ways(problem.placement) for rank in (way.sender, way.receiver))
    expected = (_PER_WAY * ends[rank] + _IN_USE * (rank in ends) for rank in range(problem.num_ranks))
    return tuple(number * max(message_bytes, default=0) for number in expected)


def with_room[T](problem: Problem, make: Callable[[Problem], T]) -> T:
    """Plan, and plan again with more memory set aside for messages where a plan's own need more than its caps leave.

    Args:
        problem: what to plan.
        make: plans a problem; raises `MessageRoomError` where messages do not fit.

    Raises:
        InfeasibleError: as `make` raises it; the cap that it names need not have room for messages.
        MessageRoomError: the messages of the last plan tried do not fit.
    """
    for _ in range(ROUNDS - 1):
        try:
            return make(problem)
        except MessageRoomError as short:
            problem = _with_room(problem, short)
    return make(problem)


def planned_with_room[T](
    problem: Problem,
    make: Callable[[Problem], T],
    smaller: Callable[[Problem], T] | None = None,
    least: Callable[[Problem], T] | None = None,
    without_offload: Callable[[Problem], T] | None = None,
) -> T:
    """Plan with room for messages, and where nothing fits, name a cap under which there is a plan.

    Args:
        problem, make: as `with_room` takes them.
        smaller: plans it with smaller windows, which have fewer messages; tried if the messages of `make`'s plans do not fit.
        least: plans it with the least memory, messages included, or names the smallest cap; the last resort. None where no
            order is known to need the least.
        without_offload: `least` of plans without offload, whose cap is named where the search with it takes `MOST_WORK`.

    Raises:
        InfeasibleError: nothing fits; the cap that it names has room for the messages of a plan.
    """
    first, is_short = problem, False
    for _ in range(ROUNDS):
        try:
            with limited(math.inf) as work:
                return make(problem)
        except MessageRoomError as short:
            problem, is_short = _with_room(problem, short), True
        except InfeasibleError as error:
            if is_short and smaller is not None:
                return planned_with_room(first, smaller, least=least, without_offload=without_offload)
            if least is not None:
                return least(first)
            if not error.least_cap_bytes:
                raise
            if without_offload is not None and work.steps > MOST_WORK:
                return _plainly(first, without_offload)
            try:
                make(replace(problem, cap_bytes=tuple(max(cap, error.least_cap_bytes) for cap in problem.cap_bytes)))
            except MessageRoomError as short:
                problem = _with_room(problem, short)
            except InfeasibleError:
                raise error from None
            else:
                if problem is first or not (missing := _missing_bytes(first, error.least_cap_bytes, make, smaller)):
                    raise
                room = problem.message_bytes or (0,) * problem.num_ranks
                problem = replace(problem, message_bytes=tuple(size + missing for size in room))
    return make(problem)


def _plainly[T](problem: Problem, without_offload: Callable[[Problem], T]) -> T:
    """Plan without offload; where nothing fits, the error says that less memory may do with it."""
    try:
        return without_offload(problem)
    except InfeasibleError as error:
        after = "\nThat would do without offload. With it less may do: to look for how much would take long."
        raise error.without("offload").within(after=after) from None


def _missing_bytes[T](
    problem: Problem, cap_bytes: int, make: Callable[[Problem], T], smaller: Callable[[Problem], T] | None
) -> int:
    """Return how many bytes more than a cap it takes to plan. Another cap means other first room, so its plans may differ.

    Args:
        problem: what to plan.
        cap_bytes: of every rank that has less.
        make, smaller: as `planned_with_room` takes them.
    """
    raised, missing = replace(problem, cap_bytes=tuple(max(cap, cap_bytes) for cap in problem.cap_bytes)), 0
    for attempt in filter(None, (make, smaller)):
        try:
            with_room(raised, attempt)
        except MessageRoomError:
            continue
        except InfeasibleError as error:
            missing = max(0, error.least_cap_bytes - cap_bytes)
        else:
            return 0
    return missing


def _with_room(problem: Problem, short: MessageRoomError) -> Problem:
    before = problem.message_bytes or (0,) * problem.num_ranks
    wanted = (size + size // _SLACK for size in short.needed)
    return replace(problem, message_bytes=tuple(map(max, before, wanted)))
