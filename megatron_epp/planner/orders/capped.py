"""1F1B with a warm-up window that is as large as the memory caps allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Chunk
from megatron_epp.planner.fit import step_bytes
from megatron_epp.planner.kernels.codes import BACKWARD, FORWARD, KIND_BITS, Codes
from megatron_epp.planner.kernels.compiled import integers
from megatron_epp.planner.order import Order, descending, slice_groups
from megatron_epp.planner.orders.warm_up import WarmUp, run_ahead, window_ahead
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables


@dataclass(frozen=True, slots=True)
class CappedWarmUp:
    """`WarmUp` with the window between the smallest and the largest, backward by backward as the caps allow.

    While a long sequence is alive its slices leave room for few other chunks, and later for more. So the smallest window waits
    where there is room, and the largest does not fit. The window counts bytes without recompute; with `room` above 1 it is
    larger, and some of them are given up by recompute.

    Attributes:
        lead: as in `WarmUp`.
        room: bytes of activations that the window may hold, as a multiple of what the caps leave.
        slack: as in `WarmUp`.
    """

    lead: float
    room: float = 1.0
    slack: int = 0

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        """Return the order of a chunk table. Arguments as in `OrderRule.order`."""
        if problem.forward_only:
            return WarmUp(self.lead, slack=self.slack).order(chunks, tables, problem)
        groups, stages, total = slice_groups(chunks), problem.num_stages, len(chunks)
        leads = [self.slack + math.floor(self.lead * (stages - 1 - stage) + 0.5) for stage in range(stages)]
        last = np.array(window_ahead(groups, minimal=False))
        for ahead_by, fitting in zip(leads, _fitting(groups, tables, problem, self.room), strict=True):
            last[ahead_by:] = np.minimum(last[ahead_by:], fitting[: max(0, total - ahead_by)])
        window = np.maximum.accumulate(np.maximum(last, window_ahead(groups, minimal=True))).tolist()
        return run_ahead(groups, stages, False, lambda stage: [*window[leads[stage] :], *[total] * min(leads[stage], total)])


def _fitting(groups: Sequence[range], tables: Tables, problem: Problem, room: float) -> list[NDArray[np.int64]]:
    """Compute how many forwards each stage may have run before each of its backwards, without recompute.

    Args:
        problem: one stage per rank, and the caps.
    """
    total, stages = groups[-1].stop if groups else 0, problem.num_stages
    forwards = np.arange(total) << KIND_BITS | FORWARD
    backwards = np.array(descending(groups), dtype=np.int64) << KIND_BITS | BACKWARD
    firsts = np.arange(stages)[:, None] * (total << KIND_BITS)
    every = Codes(
        integers((firsts + np.concatenate((forwards, backwards))).ravel()),
        integers(range(0, 2 * total * stages + 1, 2 * total)),
    )
    found = []
    for cap, static, *sizes in zip(
        problem.cap_bytes, tables.static, *step_bytes(every, tables, [[0] * total] * stages), strict=True
    ):
        takes, stays = np.array(sizes[0]), np.array(sizes[0]) - np.array(sizes[1])
        alive = np.cumsum(stays[:total])
        freed = np.cumsum(stays[total:]) - stays[total:]
        found.append(np.searchsorted(alive, room * (cap - static) - freed - takes[total:], side="right"))
    return found
