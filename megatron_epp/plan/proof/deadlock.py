"""Verification that lowered rows cannot hang, however ranks queue and synchronise their launches.

The proof assumes the strictest machine: a launch starts when all earlier launches of its rank have ended. Then a row is a
chain, and a message, a reduction or an exchange is one event that stands in several rows at once. Rows are free of deadlock if
and only if these chains can be merged, that is, have no cycle.

What passes here passes on every weaker machine, because each only waits for less:

- one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), where a launch starts behind the *start* of all earlier launches and the
  *end* of its stream's predecessor and of what it waits for, which are all earlier launches of its rank;
- several hardware queues, where fewer earlier launches are ahead of it;
- the host waiting for the device anywhere (an allocator's retry, lazy loading of kernels, pinned allocation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import Integers
from megatron_epp.plan.launches import Launches, Rows
from megatron_epp.plan.operations import MessageKind, Parties, Track, needs_of, operation, operations
from megatron_epp.plan.violation import Violation

_MOST_KEY = 1 << 62
"""Keys above could overflow 64 bits when the next column is added; they are numbered anew first."""


class BlockedAt(NamedTuple):
    replica: int
    rank: int
    position: int


def blocked(replicas: Sequence[Rows | Launches], lockstep: bool = False) -> list[BlockedAt]:
    """Find launches that wait for each other; an empty list if all rows run to their ends.

    Returns the launches of a cycle, each waiting for the next and the last for the first, or the one launch whose partner is in
    no row: each the first of its row that cannot end. Reductions join the rows of a pipeline's data-parallel replicas, and with
    `lockstep`, for shared experts, so do all forwards, backwards and recomputes.
    """
    joined = list(map(Launches.of, replicas))
    ranks = [(replica, rank) for replica, launches in enumerate(joined) for rank in range(launches.num_ranks)]
    events = _events(joined, lockstep)
    rows = [events.event[part].tolist() for part in events.rows]
    heads = _merge(rows, events.parties.tolist())
    stuck = {index: rows[index][at] for index, at in enumerate(heads) if at < len(rows[index])}
    if not stuck:
        return []
    index, seen = min(stuck), list[int]()
    while index not in seen:
        seen.append(index)
        event = stuck[index]
        ahead = (other for other, head in stuck.items() if head != event)
        following = next((other for other in ahead if event in rows[other][heads[other] :]), None)
        if following is None:  # no row has the other side
            seen = [index]
            break
        index = following
    positions = {at: int(events.position[events.rows[at]][heads[at]]) for at in stuck}
    return [BlockedAt(*ranks[at], positions[at]) for at in seen[seen.index(index) :]]


def check_launches(replicas: Sequence[Rows | Launches], lockstep: bool = False) -> Iterator[Violation]:
    """Yield a violation that names the cycle if lowered rows can hang. Arguments as in `blocked`."""
    cycle = blocked(replicas, lockstep)
    if not cycle:
        return
    in_cycle = {launch.replica: replicas[launch.replica] for launch in cycle}
    rows = {at: launches.rows() if isinstance(launches, Launches) else launches for at, launches in in_cycle.items()}
    names = []
    for replica, rank, position in cycle:
        own = f"replica {replica} " if len(replicas) > 1 else ""
        names.append(f"{own}rank {rank} {rows[replica][rank][position]} (launch {position})")
    waits = " waits for ".join([*names, names[0]]) if len(names) > 1 else f"{names[0]} waits for a partner that is in no row"
    replica, rank, position = cycle[0]
    yield Violation(rank, None, rows[replica][rank][position], f"the launches can hang: {waits}")


class _Events(NamedTuple):
    """Launches that are shared with other rows. All sides of an event have its number."""

    event: Integers  # of each launch; positions count in its row
    position: Integers  # of each launch; positions count in its row
    rows: list[slice]  # the part of these columns that is each row's
    parties: Integers  # by event, the number of rows that it waits for, whether they have it or not


def _events(replicas: Sequence[Launches], lockstep: bool) -> _Events:
    """Find the events of the rows of all replicas, one after another."""
    columns, rows, count = [(np.zeros(0, dtype=np.int64),) * 6], list[slice](), 0
    for replica, launches in enumerate(replicas):
        sides = [_Shared.of(op, replica, launches.num_ranks, lockstep) for op in launches.ops]
        shared = _Shared(*map(launches.by_op, zip(*sides, strict=True))) if sides else _Shared(*[launches.op] * 6)
        (at,) = np.nonzero(shared.operation >= 0)
        operation, offset, by_site, by_chunk, of_replica, parties = (column[at] for column in shared)
        site, chunk = by_site * launches.site[at] + offset, by_chunk * launches.chunk[at]
        columns.append((operation, site, chunk, of_replica, parties, at - launches.starts[launches.ranks()[at]]))
        rows += [slice(*ends) for ends in pairwise((count + np.searchsorted(at, launches.starts)).tolist())]
        count += len(at)
    *keys, parties, position = (np.concatenate(column) for column in zip(*columns, strict=True))
    event = _numbered(keys)
    waits_for = np.zeros(event.max(initial=-1) + 1, dtype=np.int64)
    waits_for[event] = parties
    return _Events(event, position, rows, np.where(waits_for > 0, waits_for, np.bincount(event)))


class _Shared[T](NamedTuple):
    """Event of the launches of an operation, in numbers."""

    operation: T  # number of the operation that names the event; -1 if the launches are in no event
    offset: T  # from the launch's site to the one that names the event
    # by_site, by_chunk: 1 if every site or chunk has its own event, else 0
    by_site: T
    by_chunk: T
    replica: T  # whose event it is; -1 if all replicas take part
    parties: T  # number of rows that take part; 0 for all that have it

    @staticmethod
    def of(op: Op, replica: int, num_ranks: int, lockstep: bool) -> _Shared[int]:
        known, kind = Op.known(), operation(op)
        if (side := kind.side) is None:
            return _Shared(known.index(op) if lockstep and kind.in_layers else -1, 0, 1, 1, -1, 0)
        replica = -1 if side.parties is Parties.REPLICAS else replica
        parties = {Parties.PAIR: 2, Parties.RANKS: num_ranks, Parties.REPLICAS: 0}[side.parties]
        by_site, by_chunk = int(side.site is not None), int(side.by_chunk)
        return _Shared(known.index(side.event), side.site or 0, by_site, by_chunk, replica, parties)


def _numbered(columns: Sequence[Integers]) -> Integers:
    """Number rows of columns; equal rows have equal numbers."""
    key, most = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        span = int(np.ptp(column)) + 1 if len(column) else 1
        if most * span >= _MOST_KEY:
            key = np.unique(key, return_inverse=True)[1]
            most = len(key)
        key, most = key * span + (column - column.min(initial=0)), most * span
    return np.unique(key, return_inverse=True)[1]


def _merge(rows: Sequence[Sequence[int]], parties: Sequence[int]) -> list[int]:
    """Run all rows of events as far as possible and return the number of events that each has passed."""
    at, waiting = [0] * len(rows), dict[int, list[int]]()
    missing, ready = list(parties), list(range(len(rows)))
    while ready:
        index = ready.pop()
        row = rows[index]
        for position in range(at[index], len(row)):
            event = row[position]
            missing[event] -= 1
            if missing[event] > 0:
                waiting.setdefault(event, []).append(index)
                at[index] = position
                break
            missing[event] = parties[event]
            for other in waiting.pop(event, ()):
                at[other] += 1
                ready.append(other)
        else:
            at[index] = len(row)
    return at


def check_own_messages(lowered: Rows, rows: Rows) -> Iterator[Violation]:
    """Yield a violation for each message of a rank that is missing, doubled, unknown, or launched too early or too late.

    `lowered` is the plan with the messages that it needs; `rows` are what ranks launch, compute actions and messages.
    """
    receivers = ((need.carries, kind.op) for kind in operations(Track.COMPUTE) for need in needs_of(kind.op))
    takers = {carries.receive: op for carries, op in receivers if isinstance(carries, MessageKind)}  # of the same site
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
            if taker := takers.get(action.op):
                first, second = action, action._replace(op=taker)
            else:
                (need,) = operation(action.op).needs
                first, second = action._replace(op=need.op), action
            if second in at and at[second] < at[first]:
                yield Violation(
                    rank, None, second, f"is launched at {at[second]}, before {first} (launch {at[first]}), which it needs"
                )


def _is_message(op: Op) -> bool:
    side = operation(op).side
    return side is not None and side.parties is Parties.PAIR
