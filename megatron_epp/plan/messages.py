"""Device memory of messages in flight: payloads until they have left, buffers from the posted receive to the last use."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.columns import Booleans, Bytes, byte_column
from megatron_epp.plan.launches import Launches, Rows
from megatron_epp.plan.operations import Message, Role, Track, needs_of, operations
from megatron_epp.plan.plan import Plan


def message_peaks(plan: Plan, rows: Rows | Launches) -> tuple[int, ...]:
    """Peak bytes of messages on each rank.

    A payload takes memory from the start of the action that makes it to the next send on its link, which waits for its
    transfer; a stage on the same rank takes it over instead. A received one takes memory from where its receive is posted: an
    activation to the start of its forward, whose own bytes hold it from there on, a gradient to the end of its backward.
    Buffers of collectives and of messages of added operations are in the bytes of the steps that make and need them.

    Args:
        plan: the lowered plan; `plan.messages.num_bytes` are the sizes.
        rows: of every rank, lowered.
    """
    if not plan.messages.num_bytes:
        return (0,) * plan.num_ranks
    launches = Launches.of(rows)
    begins, ends = _changes(plan, launches)
    live = np.cumsum(np.stack([begins, ends], axis=1))
    peaks = []
    for first, last in pairwise((2 * launches.starts).tolist()):
        before = live[first - 1] if first else 0
        peaks.append(max(0, int(live[first:last].max(initial=before) - before)))
    return tuple(peaks)


def check_messages(plan: Plan, launches: Launches) -> Iterator[Violation]:
    """Yield a violation for each rank with more bytes in flight than `plan.message_bytes` reserves for it."""
    if not plan.message_bytes:
        return
    for rank, (size, peak) in enumerate(zip(plan.message_bytes, message_peaks(plan, launches), strict=True)):
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


def _changes(plan: Plan, launches: Launches) -> tuple[Bytes, Bytes]:
    """Bytes by which the messages held by a launch's rank grow when it starts and when it ends."""
    makes, takes, opens, sends, receives = _Sides.of_table()
    ops, site = launches.ops, launches.site
    size = byte_column(plan.messages.num_bytes)[launches.chunk]

    def is_one_of(kinds: Container[Op]) -> Booleans:
        return launches.by_op(op in kinds for op in ops).astype(bool)

    def has_other_side(kinds: Mapping[Op, int]) -> Booleans:
        other = site + launches.by_op(kinds.get(op, 0) for op in ops)
        return is_one_of(kinds) & (other >= 0) & (other < plan.num_stages)

    taken, sent = has_other_side(takes), np.flatnonzero(is_one_of(sends))
    begins = np.where(has_other_side(makes), size, 0) - np.where(taken & is_one_of(opens), size, 0)
    begins += np.where(is_one_of(receives), size, 0)
    ends = -np.where(taken & ~is_one_of(opens), size, 0)
    target = np.array(plan.placement)[site[sent] + launches.by_op(sends.get(op, 0) for op in ops)[sent]]
    link = (launches.ranks()[sent] * plan.num_ranks + target) * len(ops) + launches.op[sent]
    order = np.argsort(link, kind="stable")
    sent, follows = sent[order], link[order][1:] == link[order][:-1]
    ends[sent[1:][follows]] -= size[sent[:-1][follows]]
    return begins, ends
