"""Times and sizes of added operations, such as the vocabulary shards', as the table of operations describes them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.plan import Action
from megatron_epp.plan.operations import operation
from megatron_epp.planner.tables import Tables


def rank_of(action: Action, tables: Tables) -> int:
    """Return the rank of an action's site."""
    return operation(action.op).sites(tables.rank_of)[action.stage]


def times_of(tables: Tables) -> Iterator[float]:
    """Yield all times of added operations and of their transfers, in microseconds."""
    for rows in tables.added.values():
        for times_us in (*rows.time_us, *rows.collective_us.values(), *rows.message_us.values()):
            yield from times_us


def profile_of(tables: Tables, c: int) -> tuple[float, ...]:
    """Return all times and sizes of a chunk's added operations."""
    values: list[float] = []
    for rows in tables.added.values():
        times = *rows.time_us, *rows.collective_us.values(), *rows.message_us.values()
        values += [row[c] for row in (*times, *rows.takes, *rows.gives)]
    return tuple(values)
