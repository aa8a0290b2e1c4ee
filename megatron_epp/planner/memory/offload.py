"""Copies of activations that overlap with an order: bytes that are away between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Action, Op
from megatron_epp.plan.copy_positions import CopyTimes, copy_positions
from megatron_epp.plan.kv_offload import in_units
from megatron_epp.planner.evaluate import Played, RecomputeSteps, moved_of
from megatron_epp.planner.fit import step_bytes
from megatron_epp.planner.kernels.codes import Codes
from megatron_epp.planner.order import CopyOrder, Order
from megatron_epp.planner.tables import Tables

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Offload:
    """Copies overlapped with an order; `shares` of the kept bytes that are copied away are ``[stage][chunk]``."""

    recompute_steps: RecomputeSteps
    shares: tuple[tuple[float, ...], ...]
    copies: CopyOrder

    def moved(self, tables: Tables, stage: int, c: int) -> int:
        kept_bytes = tables.kept_bytes(stage, c, self.recompute_steps[stage][c])
        return moved_of(kept_bytes, tables.layer_input(stage, c), self.shares[stage][c])

    def most_away(self, tables: Tables) -> list[int]:
        return [
            max(
                accumulate(in_units(self.moved(tables, stage, c)) * (1 if op is Op.O else -1) for (op, stage, c), _ in row),
                default=0,
            )
            for row in self.copies
        ]


class Copied(NamedTuple):
    """Copies that keep ranks within their memory caps, and the bytes that a rank lacks in host memory for them."""

    makespan_us: float
    offloads: tuple[Offload, ...]
    short_bytes: int


def timed(offload: Offload, tables: Tables) -> list[list[tuple[Action, float, Action | None]]]:
    """List the copies of every rank with the microseconds that each takes, as `play` takes them."""
    took_us = cache(lambda stage, c: tables.host_us(offload.moved(tables, stage, c)))  # for a copy out and the one back
    return [[(action, took_us(action.stage, action.chunk), after) for action, after in row] for row in offload.copies]


def peaks_with_copies(order: Order | Codes, tables: Tables, offload: Offload, played: Played) -> list[int]:
    """Compute the most bytes that each rank holds at a time, equal to what `simulate` says of the plan."""
    peaks = []
    for rank, (static, takes, gives) in enumerate(
        zip(tables.static, *step_bytes(order, tables, offload.recompute_steps), strict=True)
    ):
        at, more = _changes(tables, offload, played, rank)
        when = np.concatenate((3 * at, np.repeat(3 * np.arange(len(takes)), 2) + np.tile((1, 2), len(takes))))
        delta = np.concatenate((more, np.ravel(np.column_stack((takes, np.negative(gives))))))
        peaks.append(int(static + np.cumsum(delta[np.argsort(when, kind="stable")]).max()))
    return peaks


def away_bytes(tables: Tables, offload: Offload, played: Played) -> list[list[int]]:
    """Compute the bytes that each rank has away in host memory while each of its actions runs, ``[rank][position]``."""
    away_rows = []
    for rank, starts in enumerate(played.start_us):
        at, more = _changes(tables, offload, played, rank)
        away = np.zeros(len(starts) + 1, dtype=np.int64)
        np.subtract.at(away, at, more)
        away_rows.append(np.cumsum(away)[:-1].tolist())
    return away_rows


def _changes(tables: Tables, offload: Offload, played: Played, rank: int) -> tuple[Integers, Integers]:
    """Compute a rank's changes of bytes by copies, in order: the actions before which they come, and signed sizes."""
    starts, ends = played.start_us[rank], played.end_us[rank]
    actions, moved = [action for action, _ in offload.copies[rank]], cache(lambda stage, c: offload.moved(tables, stage, c))
    ran = map(CopyTimes, actions, played.copy_start_us[rank], played.copy_end_us[rank], repeat(len(starts)))
    sizes = [moved(stage, c) * (1 if op is Op.L else -1) for op, stage, c in actions]
    at = [position.changes for position in copy_positions(starts, ends, ran)]
    return np.array(at, dtype=np.int64), np.array(sizes, dtype=np.int64)
