"""Device memory of messages in flight: payloads until they have left, buffers from the posted receive to the last use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.plan import Plan

_NEXT = {Op.F: 1, Op.B: -1, Op.SEND_F: 1, Op.SEND_B: -1}


def message_peaks(plan: Plan, rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Peak bytes of messages on each rank.

    A payload takes memory from the start of the action that makes it to the next send on its link, which waits for its
    transfer; a stage on the same rank takes it over instead. A received one takes memory from where its receive is posted: an
    activation to the start of its forward, whose own bytes hold it from there on, a gradient to the end of its backward.

    Args:
        plan: the lowered plan; `plan.messages.num_bytes` are the sizes.
        rows: of every rank (`lower`).
    """
    if not plan.messages.num_bytes:
        return (0,) * plan.num_ranks
    return tuple(max(_held(plan, row)) for row in rows)


def check_messages(plan: Plan, rows: Sequence[Sequence[Action]]) -> Iterator[Violation]:
    """Yield a violation for each rank with more bytes in flight than `plan.message_bytes` reserves for it."""
    if not plan.message_bytes:
        return
    for rank, (size, peak) in enumerate(zip(plan.message_bytes, message_peaks(plan, rows), strict=True)):
        if peak > size:
            yield Violation(rank, None, None, f"messages in flight take {peak} bytes; {size} are set aside for them")


def _held(plan: Plan, row: Sequence[Action]) -> Iterator[int]:
    """Yield the bytes held by messages at the start of a rank's row and after each increase."""
    sizes, last = plan.messages.num_bytes, plan.num_stages - 1
    leaving: dict[tuple[int, Op], int] = {}
    held = 0
    yield held
    for op, stage, chunk in row:
        size = sizes[chunk]
        if op is Op.F or op is Op.B:
            if op is Op.F and stage > 0:
                held -= size
            if 0 <= stage + _NEXT[op] <= last:
                held += size
            yield held
            if op is Op.B and stage < last:
                held -= size
        elif op is Op.RECV_F or op is Op.RECV_B:
            held += size
            yield held
        elif op is Op.SEND_F or op is Op.SEND_B:
            link = plan.placement[stage + _NEXT[op]], op
            held -= leaving.get(link, 0)
            leaving[link] = size
