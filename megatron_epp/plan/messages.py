"""Device memory of messages in flight: payloads until they have left, buffers from the posted receive to the last use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.operations import Message, Role, Track, needs_of, operations
from megatron_epp.plan.plan import Plan


def message_peaks(plan: Plan, rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Peak bytes of messages on each rank.

    A payload takes memory from the start of the action that makes it to the next send on its link, which waits for its
    transfer; a stage on the same rank takes it over instead. A received one takes memory from where its receive is posted: an
    activation to the start of its forward, whose own bytes hold it from there on, a gradient to the end of its backward.
    Buffers of collectives and of messages of added operations are in the bytes of the steps that make and need them.

    Args:
        plan: the lowered plan; `plan.messages.num_bytes` are the sizes.
        rows: of every rank (`lower`).
    """
    if not plan.messages.num_bytes:
        return (0,) * plan.num_ranks
    sides = _Sides.of_table()
    return tuple(max(_held(plan, row, sides)) for row in rows)


def check_messages(plan: Plan, rows: Sequence[Sequence[Action]]) -> Iterator[Violation]:
    """Yield a violation for each rank with more bytes in flight than `plan.message_bytes` reserves for it."""
    if not plan.message_bytes:
        return
    for rank, (size, peak) in enumerate(zip(plan.message_bytes, message_peaks(plan, rows), strict=True)):
        if peak > size:
            yield Violation(rank, None, None, f"messages in flight take {peak} bytes; {size} are set aside for them")


class _Sides(NamedTuple):
    """Operations with messages, each with the offset from its site to that on the other side.

    Attributes:
        makes, takes: those whose result is a message, and those that need one.
        opens: those of `takes` whose own bytes hold the message from their start on.
        sends: those that send one.
        receives: those that receive one.
    """

    makes: dict[Op, int]
    takes: dict[Op, int]
    opens: set[Op]
    sends: dict[Op, int]
    receives: set[Op]

    @classmethod
    def of_table(cls) -> _Sides:
        """Read the table of operations, for messages between stages."""
        sides = cls({}, {}, set(), {}, set())
        for kind in operations(Track.COMPUTE):
            for need in needs_of(kind.op):
                if isinstance(need.carries, Message) and need.carries.times and isinstance(need.site, int):
                    sides.makes[need.op], sides.takes[kind.op] = -need.site, need.site
                    sides.sends[need.carries.send] = -need.site
                    sides.receives.add(need.carries.receive)
                    if kind.role is Role.OPENS:
                        sides.opens.add(kind.op)
        return sides


def _held(plan: Plan, row: Sequence[Action], sides: _Sides) -> Iterator[int]:
    """Yield the bytes held by messages at the start of a rank's row and after each increase."""
    sizes, last = plan.messages.num_bytes, plan.num_stages - 1
    makes, takes, opens, sends, receives = sides
    leaving: dict[tuple[int, Op], int] = {}
    held = 0
    yield held
    for op, stage, chunk in row:
        size = sizes[chunk]
        if op in makes or op in takes:
            from_other = op in takes and 0 <= stage + takes[op] <= last
            held -= size if from_other and op in opens else 0
            held += size if op in makes and 0 <= stage + makes[op] <= last else 0
            yield held
            held -= size if from_other and op not in opens else 0
        elif op in receives:
            held += size
            yield held
        elif op in sends:
            link = plan.placement[stage + sends[op]], op
            held -= leaving.get(link, 0)
            leaving[link] = size
