"""Verification that lowered rows cannot hang, however ranks queue and synchronise their launches.

Ranks launch their rows in order. The proof assumes the strictest machine: a launch starts when all earlier launches of its
rank have ended. Then a row is a chain, and a message, a reduction or an exchange is one event that stands in several rows at
once. Rows are free of deadlock if and only if these chains can be merged, that is, have no cycle.

What passes here passes on every weaker machine, because each only waits for less:

- one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), where a launch starts behind the *start* of all earlier launches and the
  *end* of its stream's predecessor and of what it waits for; those are all earlier launches of its rank;
- several hardware queues, where fewer earlier launches are ahead of it;
- the host waiting for the device anywhere (an allocator's retry, lazy loading of kernels, pinned allocation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.operations import Parties, operations

Rows = Sequence[Sequence[Action]]

_Event = tuple[Op, int, int, int]
"""Key of an event shared by several rows: operation, site, chunk, and its replica, or -1 if all replicas take part."""


class BlockedAt(NamedTuple):
    """A launch of lowered rows."""

    replica: int
    rank: int
    position: int


def blocked(replicas: Sequence[Rows], lockstep: bool = False) -> list[BlockedAt]:
    """Find launches that wait for each other; an empty list if all rows run to their ends.

    Args:
        replicas: the rows of `lower` of each data-parallel replica of one pipeline: reductions join them.
        lockstep: the replicas share experts, so every forward, backward and recompute joins them too.

    Returns:
        the launches of a cycle, each waiting for the next one and the last for the first, or the one launch whose partner is
        in no row. Each is the first of its row that cannot end.
    """
    ranks = [(replica, rank) for replica, rows in enumerate(replicas) for rank in range(len(rows))]
    rows = [_events(row, replica, lockstep) for replica, one in enumerate(replicas) for row in one]
    parties = _parties(rows, replicas)
    heads = _merge(rows, parties)
    stuck = {index: rows[index][at] for index, at in enumerate(heads) if at < len(rows[index])}
    if not stuck:
        return []
    index, seen = min(stuck), list[int]()
    while index not in seen:
        seen.append(index)
        event, _ = stuck[index]
        ahead = (other for other, (head, _) in stuck.items() if head != event)
        following = next((other for other in ahead if any(event == later for later, _ in rows[other][heads[other] :])), None)
        if following is None:  # no row has the other side
            seen = [index]
            break
        index = following
    return [BlockedAt(*ranks[at], stuck[at][1]) for at in seen[seen.index(index) :]]


def check_launches(replicas: Sequence[Rows], lockstep: bool = False) -> Iterator[Violation]:
    """Yield a violation that names the cycle if lowered rows can hang. Arguments as for `blocked`."""
    cycle = blocked(replicas, lockstep)
    if not cycle:
        return
    names = []
    for replica, rank, position in cycle:
        own = f"replica {replica} " if len(replicas) > 1 else ""
        names.append(f"{own}rank {rank} {replicas[replica][rank][position]} (launch {position})")
    waits = " waits for ".join([*names, names[0]]) if len(names) > 1 else f"{names[0]} waits for a partner that is in no row"
    replica, rank, position = cycle[0]
    yield Violation(rank, None, replicas[replica][rank][position], f"the launches of the lowered plan can hang: {waits}")


def _events(row: Sequence[Action], replica: int, lockstep: bool) -> list[tuple[_Event, int]]:
    """Return the events that a row shares with other rows, each with its position. All sides of an event have the same key."""
    found: list[tuple[_Event, int]] = []
    kinds = {kind.op: kind for kind in operations() if kind.side is not None or (lockstep and kind.in_layers)}
    for position, (op, site, chunk) in enumerate(row):
        kind = kinds.get(op)
        if kind is None:
            continue
        if (side := kind.side) is None:
            found.append(((op, site, chunk, -1), position))
        else:
            at = 0 if side.site is None else site + side.site
            one = -1 if side.parties is Parties.REPLICAS else replica
            found.append(((side.event, at, chunk if side.by_chunk else 0, one), position))
    return found


def _parties(rows: Sequence[Sequence[tuple[_Event, int]]], replicas: Sequence[Rows]) -> dict[_Event, int]:
    """Number of rows that each event waits for, whether they have it or not."""
    found = Counter(event for row in rows for event, _ in row)
    sides = {kind.op: kind.side.parties for kind in operations() if kind.side is not None}
    for event in found:
        match sides.get(event[0]):
            case Parties.PAIR:
                found[event] = 2
            case Parties.RANKS:
                found[event] = len(replicas[event[3]])
    return found


def _merge(rows: Sequence[Sequence[tuple[_Event, int]]], parties: Mapping[_Event, int]) -> list[int]:
    """Run all rows as far as possible and return the number of events that each has passed."""
    at, waiting = [0] * len(rows), dict[_Event, list[int]]()
    ready = list(range(len(rows)))
    while ready:
        index = ready.pop()
        row = rows[index]
        while at[index] < len(row):
            event = row[at[index]][0]
            there = waiting.pop(event, [])
            there.append(index)
            if len(there) < parties[event]:
                waiting[event] = there
                break
            for other in there:
                at[other] += 1
            ready += there[:-1]
    return at
