"""Added operations, such as the vocabulary shards', in the constraint program, as the table of operations describes them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from megatron_epp.plan import Action, Op
from megatron_epp.plan.operations import Collective, Of, needs_of, operation
from megatron_epp.plan.relations import resolve
from megatron_epp.planner.tables import Tables

if TYPE_CHECKING:
    from megatron_epp.contrib.exact.program import Program


def rank_of(action: Action, tables: Tables) -> int:
    """Return the rank of an action's site."""
    return operation(action.op).sites(tables.rank_of)[action.stage]


def times_of(tables: Tables) -> Iterator[float]:
    """Yield all times of added operations and of their transfers, in microseconds."""
    for rows in tables.added.values():
        for times_us in (*rows.time_us, *rows.collective_us.values(), *rows.message_us.values()):
            yield from times_us


def add_actions(program: Program) -> None:
    """Add the added operations' actions, what they wait for and what waits for them, and one order of their collectives.

    A collective is launched by all ranks in one order, so the actions whose results it carries have one order on all sites.
    """
    added, chunks = program.tables.added, range(len(program.chunks))
    carried = {need.op for op in added for need in needs_of(op) if isinstance(need.carries, Collective)}
    for op, rows in added.items():
        for site, times_us in enumerate(rows.time_us):
            for c in chunks:
                program.add_span(Action(op, site, c), [program.clock.ticks(times_us[c])])
    for op in (Op.F, Op.B, *added):
        for site in range(len(operation(op).sites(program.tables.rank_of))):
            _add_needs(program, op, site)
    for op, rows in added.items():
        sites = range(len(rows.time_us))
        for u, v in combinations(chunks, 2) if len(sites) > 1 and op in carried else ():
            program.add_turn([(Action(op, site, u), Action(op, site, v)) for site in sites])


def _add_needs(program: Program, op: Op, site: int) -> None:
    """Add what the actions of a site wait for, where they or those are of an added operation.

    Args:
        op, site: the operation that waits, and where.
    """
    tables = program.tables
    for other in resolve(op, site, tables.rank_of):
        if other.need.chunk is not Of.SAME or not {op, other.op} & set(tables.added):
            continue
        carried_us = tables.transfer_us(other.need.carries, min(site, other.site))
        for c in range(len(program.chunks)):
            program.follows(Action(op, site, c), Action(other.op, other.site, c), program.clock.ticks(carried_us[c]))


def changes_of(program: Program) -> Iterator[tuple[int, int, list[tuple[Any, int]]]]:
    """Yield rank, chunk, and the times and signed bytes of what added operations of a site hold, in the order of the table."""
    added = program.tables.added
    of_sites: dict[tuple[int, ...], list[Op]] = {}
    for op in added:
        of_sites.setdefault(tuple(operation(op).sites(program.tables.rank_of)), []).append(op)
    for ranks, ops in of_sites.items():
        for (site, rank), c in product(enumerate(ranks), range(len(program.chunks))):
            changes: list[tuple[Any, int]] = []
            for op in ops:
                span = program.spans[Action(op, site, c)]
                changes += [(span.start, added[op].takes[site][c]), (span.end, -added[op].gives[site][c])]
            yield rank, c, changes


def profile_of(tables: Tables, c: int) -> tuple[float, ...]:
    """Return all times and sizes of a chunk's added operations."""
    values: list[float] = []
    for rows in tables.added.values():
        times = *rows.time_us, *rows.collective_us.values(), *rows.message_us.values()
        values += [row[c] for row in (*times, *rows.takes, *rows.gives)]
    return tuple(values)
