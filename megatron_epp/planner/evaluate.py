"""Makespan of an order without building a plan: the arithmetic of `simulate`, reduced to the needs of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.planner.kernels import timing
from megatron_epp.planner.kernels.codes import Codes, code_of, decode, encode_known
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, float_zeros, floats, integer_zeros, integers, numbers
from megatron_epp.planner.kernels.pass_table import PassTable
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Sizes, Tables, Times

RecomputeSteps = Sizes
"""Recompute ``[stage][chunk]`` in recompute steps (see `passes`): layers, where whole layers are the only mode."""

Copies = Sequence[Sequence[tuple[Action, float, Action | None]]]
"""Offloads and loads of every rank in order, each with its time and the compute action that it is issued after."""


@dataclass(frozen=True, slots=True)
class Played:
    """Times of an order, ``[rank][position]``."""

    start_us: Times
    end_us: Times
    copy_start_us: Times
    copy_end_us: Times

    def of(self, rank: int) -> tuple[Sequence[float], Sequence[float]]:
        return self.start_us[rank], self.end_us[rank]

    @property
    def makespan_us(self) -> float:
        return max((row[-1] for row in self.end_us if row), default=0.0)


def action_times(codes: Codes, tables: Tables, recompute_steps: RecomputeSteps) -> FloatList:
    """Time of every node (`PassTable`): of backwards with recompute, and without weight gradients that the order splits off."""
    columns = tables.columns_with(codes.kinds)
    split, durations_us = integer_zeros(columns.num_items), floats(columns.action_us)
    if tables.trains:
        timing.mark_split(codes.actions, split)
        timing.durations(columns, integers(chain.from_iterable(recompute_steps)), split, durations_us)
    return durations_us


def recompute_times(tables: Tables, recompute_steps: RecomputeSteps) -> tuple[tuple[float, ...], ...]:
    """Compute the part of each backward that is recompute, ``[stage][chunk]``."""
    chunks, rows = np.arange(tables.num_chunks), zip(tables.passes, recompute_steps, strict=True)
    return tuple(tuple(passes.ways.again_us[chunks, row].tolist()) for passes, row in rows)


def moved_of(kept_bytes: int, layer_input: int, share: float) -> int:
    """Compute the bytes that an offload of a share of the kept bytes moves: at least the input of one layer, or nothing.

    Splitting one tensor takes room that another has made by leaving whole (see `features.offload.activations.choose`).
    """
    return max(int(kept_bytes * share), min(kept_bytes, layer_input)) if share > 0.0 else 0


def makespan_us(order: Order | Codes, tables: Tables, recompute_steps: RecomputeSteps, copies: Copies = ()) -> float:
    """End of the last action, equal to what `simulate` says of the plan. Raises `PlanError` when the order deadlocks."""
    return _play(order, tables, recompute_steps, copies)[0]


def play(order: Order | Codes, tables: Tables, recompute_steps: RecomputeSteps, copies: Copies = ()) -> Played:
    """Time an order, for any placement, with or without weight gradients of their own and copies.

    The order must have the slices of a sequence ascending in forward and descending in backward on every rank, which is then
    all they ask for; `check` has the last word on that. Raises `PlanError` if the order deadlocks.
    """
    _, codes, room, moved = _play(order, tables, recompute_steps, copies)
    return Played(
        _rows(room.start_us, codes.starts),
        _rows(room.end_us, codes.starts),
        _rows(moved.start_us, moved.starts),
        _rows(moved.end_us, moved.starts),
    )


def room_for(codes: Codes, columns: PassTable) -> timing.Room:
    actions, ranks = len(codes.actions), codes.num_ranks
    times = [float_zeros(count) for count in (actions, actions, ranks, len(columns.need_starts) - 1)]
    return timing.Room(times[0], times[1], integer_zeros(ranks), *times[2:])


def copy_columns(
    copies: Copies, num_chunks: int, num_items: int, links: Sequence[int] = (), codes: Codes | None = None
) -> timing.CopyColumns:
    """Copies as columns; `load_of` is empty where there are none. Copies that wait for actions need the order's `codes`."""
    row = list(chain.from_iterable(copies))
    items = [action.stage * num_chunks + action.chunk for action, _, _ in row]
    load_of = [-1] * (num_items if row else 0)
    for at, (action, _, _) in enumerate(row):
        if action.op is Op.L:
            load_of[items[at]] = at
    position = {int(code): at for at, code in enumerate(codes.actions)} if codes is not None and row else {}
    return timing.CopyColumns(
        items=integers(items),
        is_load=integers(int(action.op is Op.L) for action, _, _ in row),
        time_us=floats(time_us for _, time_us, _ in row),
        after=integers(-1 if after is None else position[code_of(after, num_chunks)] for _, _, after in row),
        starts=integers(accumulate(map(len, copies), initial=0)),
        load_of=integers(load_of),
        links=integers(links),
        start_us=float_zeros(len(row)),
        end_us=float_zeros(len(row)),
        at=integer_zeros(len(copies)),
        clock_us=float_zeros(len(copies)),
        lane_us=float_zeros(2 * (max(links, default=-1) + 1)),
    )


def _play(
    order: Order | Codes, tables: Tables, recompute_steps: RecomputeSteps, copies: Copies
) -> tuple[float, Codes, timing.Room, timing.CopyColumns]:
    chunks = tables.num_chunks
    codes = order if isinstance(order, Codes) else encode_known(order, chunks)
    columns, durations_us = tables.columns_with(codes.kinds), action_times(codes, tables, recompute_steps)
    room, moved = room_for(codes, columns), copy_columns(copies, chunks, columns.num_items, tables.host_links, codes)
    took_us = timing.play(codes.actions, codes.starts, columns, durations_us, moved, room)
    if took_us == timing.STUCK:
        waiting = [r for r in range(codes.num_ranks) if room.at[r] < codes.starts[r + 1]]
        heads = [str(decode(codes, chunks)[r][room.at[r] - codes.starts[r]]) for r in waiting]
        raise PlanError(f"the order deadlocks; the ranks that are not done wait at {', '.join(heads) or 'copies'}")
    return float(took_us), codes, room, moved


def _rows(column: FloatList, starts: IntegerList) -> Times:
    entries = numbers(column)
    return [entries[starts[rank] : starts[rank + 1]] for rank in range(len(starts) - 1)]
