"""Device memory of messages in flight: the slots in which they travel, and the tensors that are copied to a slot or from one.

A tensor that NCCL sends or receives is not free for others before its transfer has ended on the device, however far the host is
ahead. So messages are copied into slots to be sent, and out when they are needed; these stay allocated while a plan runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import Booleans, Bytes, Integers, byte_column
from megatron_epp.plan.communicators import Direction
from megatron_epp.plan.launches import Launches, Rows
from megatron_epp.plan.operations import MessageKind, Role, Track, needs_of, operations
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.violation import Violation, fault

SEND_SLOTS = 2
"""Slots of a direction for messages to send: one is filled while the message before it is on its way."""


def message_peaks(plan: Plan, rows: Rows | Launches) -> tuple[int, ...]:
    """Peak bytes of messages on each rank, given the lowered rows of all. `plan.messages.num_bytes` are the messages' sizes.

    Slots, each as large as the largest message, take memory throughout. A payload takes memory from the start of the action
    that makes it to its send, which copies it; a stage on the same rank takes it over instead. An activation that is copied out
    of a slot is among the bytes of its forward; a gradient is added to the bytes of its backward, until its end. Buffers of
    collectives and of messages of added operations are in the bytes of the steps that make and need them.
    """
    if not plan.messages.num_bytes:
        return (0,) * plan.num_ranks
    launches = Launches.of(rows)
    slots = _slots(plan, launches, launches.ranks())
    held = np.bincount(slots.rank, slots.slots, plan.num_ranks).astype(np.int64) * max(plan.messages.num_bytes)
    begins, ends = _changes(plan, launches)
    live = np.cumsum(np.stack([begins, ends], axis=1))
    peaks = []
    for size, (first, last) in zip(held.tolist(), pairwise((2 * launches.starts).tolist()), strict=True):
        before = live[first - 1] if first else 0
        peaks.append(size + max(0, int(live[first:last].max(initial=before) - before)))
    return tuple(peaks)


def slots_of(plan: Plan, rank: int, row: Sequence[Action]) -> dict[Direction, int]:
    """Return the number of slots of every direction in which messages of a rank go.

    A direction from another rank has as many as there are messages at one time that are posted and not needed yet. A slot is
    posted again only behind the action that needs its message, so no rank waits for a slot. Of the messages to another rank all
    may be on their way, but for each behind `SEND_SLOTS` the rank's stream waits for an earlier one.
    """
    launches = Launches.of([row])
    slots = _slots(plan, launches, np.full(len(launches.op), rank))
    rows = zip(*(column.tolist() for column in (slots.sender, slots.receiver, slots.gradient, slots.slots)), strict=True)
    return {Direction(sender, receiver, bool(gradient)): count for sender, receiver, gradient, count in rows}


def check_messages(plan: Plan, launches: Launches) -> Iterator[Violation]:
    """Yield a violation for each rank with more bytes in flight than `plan.message_bytes` reserves for it."""
    if not plan.message_bytes:
        return
    for rank, (size, peak) in enumerate(zip(plan.message_bytes, message_peaks(plan, launches), strict=True)):
        if peak > size:
            yield fault(f"messages in flight take {peak} bytes; {size} are set aside for them", rank)


class _Sides(NamedTuple):
    """Operations with messages, each with the offset from its site to the site on the other side.

    `makes` have a message as their result, `takes` need one, and of these the own bytes of `opens` hold it from their start on.
    """

    makes: dict[Op, int]
    takes: dict[Op, int]
    opens: set[Op]
    sends: dict[Op, int]
    receives: dict[Op, int]

    @classmethod
    def of_table(cls) -> _Sides:
        sides = cls({}, {}, set(), {}, {})
        for kind in operations(Track.COMPUTE):
            for need in needs_of(kind.op):
                if isinstance(need.carries, MessageKind) and need.carries.times and isinstance(need.site, int):
                    sides.makes[need.op], sides.takes[kind.op] = -need.site, need.site
                    sides.sends[need.carries.send] = -need.site
                    sides.receives[need.carries.receive] = need.site
                    if kind.role is Role.OPENS:
                        sides.opens.add(kind.op)
        return sides


class _Others(NamedTuple):
    """Launches with messages to or from a stage: their indices, the other side's ranks, and True where it is the later one."""

    at: Integers
    rank: Integers
    is_up: Booleans

    @classmethod
    def of(cls, plan: Plan, launches: Launches, offsets: Mapping[Op, int]) -> _Others:
        is_one = launches.by_op(op in offsets for op in launches.ops).astype(bool)
        offset = launches.by_op(offsets.get(op, 0) for op in launches.ops)
        site = launches.site + offset
        at = np.flatnonzero(is_one & (site >= 0) & (site < plan.num_stages))
        return cls(at, np.array(plan.placement)[site[at]], offset[at] > 0)


class _Slots(NamedTuple):
    """Number of slots by rank and direction."""

    rank: Integers
    sender: Integers
    receiver: Integers
    gradient: Integers
    slots: Integers


def _slots(plan: Plan, launches: Launches, rank: Integers) -> _Slots:
    sides = _Sides.of_table()
    sent = _Others.of(plan, launches, sides.sends)
    key = ((rank[sent.at] * plan.num_ranks + rank[sent.at]) * plan.num_ranks + sent.rank) * 2 + ~sent.is_up
    pairs, count = np.unique(key, return_counts=True)
    keys, counts = [pairs], [np.minimum(count, SEND_SLOTS)]
    received, taken = (_Others.of(plan, launches, offsets) for offsets in (sides.receives, sides.takes))
    at, other = np.append(received.at, taken.at), np.append(received.rank, taken.rank)
    is_up, change = np.append(received.is_up, taken.is_up), np.repeat([1, -1], [len(received.at), len(taken.at)])
    key = ((rank[at] * plan.num_ranks + other) * plan.num_ranks + rank[at]) * 2 + is_up
    order = np.lexsort((at, key))
    order = order[other[order] != rank[at[order]]]
    if len(order):
        pairs, first = np.unique(key[order], return_index=True)
        keys.append(pairs)
        counts.append(np.maximum.reduceat(np.cumsum(change[order]), first))  # every direction ends at 0: all messages are taken
    key, gradient = np.divmod(np.concatenate(keys), 2)
    key, receiver = np.divmod(key, plan.num_ranks)
    return _Slots(*np.divmod(key, plan.num_ranks), receiver, gradient, np.concatenate(counts))


def _changes(plan: Plan, launches: Launches) -> tuple[Bytes, Bytes]:
    """Bytes besides slots by which the messages held by a launch's rank grow when it starts and when it ends."""
    sides, rank = _Sides.of_table(), launches.ranks()
    size = byte_column(plan.messages.num_bytes)[launches.chunk]
    begins, ends = np.zeros_like(size), np.zeros_like(size)
    results, sent, taken = (_Others.of(plan, launches, offsets) for offsets in (sides.makes, sides.sends, sides.takes))
    begins[results.at] += size[results.at]
    ends[sent.at] -= size[sent.at]
    opens = launches.by_op(op in sides.opens for op in launches.ops).astype(bool)[taken.at]
    is_local = taken.rank == rank[taken.at]
    begins[taken.at[opens & is_local]] -= size[taken.at[opens & is_local]]
    begins[taken.at[~opens & ~is_local]] += size[taken.at[~opens & ~is_local]]
    ends[taken.at[~opens]] -= size[taken.at[~opens]]
    return begins, ends
