"""List scheduling: an order for any placement, made by running the pipeline and letting every rank take what is ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megatron_epp.features.stages import ready
from megatron_epp.plan import Chunk, PlanError
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.kernels.codes import BACKWARD, FORWARD, WEIGHT, CodedOrder, Codes
from megatron_epp.planner.kernels.compiled import float_zeros, floats, integer_zeros, integers, numbers
from megatron_epp.planner.order import Order, descending, runs_of
from megatron_epp.planner.orders.warm_up import window_ahead, windows_of
from megatron_epp.planner.tables import Tables


@dataclass(frozen=True, slots=True)
class ListScheduling:
    """Order rule for any placement: a free rank takes what is ready, deepest stage first.

    Of a forward and a backward that are both ready it takes the backward, or with `alternating` the kind that it did not run
    last. The first keeps less alive, with the second ranks wait less; which is faster depends on the batch.

    Every stage runs forwards in the order of the table and backwards sequence by sequence with descending slices, so messages
    never cross. A rank starts no further chunk on its first stage while `window` times the ranks (plus the slices of the
    sequence whose backward is next, less one, and `slack` as in `WarmUp`) are between forward and backward there, unless the
    next backward needs it. So there is no deadlock.

    Unless `waiting` is None, weight gradients run apart from their backwards, where nothing else is ready or so many times the
    ranks wait. They shape the order and are not in it (`orders.completion`).
    """

    window: float
    alternating: bool = False
    waiting: float | None = None
    slack: int = 0

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        return order_of(ready_of(chunks, tables, problem, self))


def order_of(run: ready.Ready) -> CodedOrder:
    """Run a pipeline, and return its order. Raises `PlanError` if not all actions can run."""
    starts = [*numbers(run.filled), len(run.out)]
    ready.run(run)
    if numbers(run.filled) != starts[1:]:
        raise PlanError("list scheduling stopped before all actions ran: the chunks are not a table in forward order")
    return CodedOrder(Codes(run.out, integers(starts)), run.num_chunks)


def ready_of(chunks: Sequence[Chunk], tables: Tables, problem: Problem, rule: ListScheduling) -> ready.Ready:
    """Collect times and limits of a chunk table, and storage."""
    groups = runs_of(chunks, problem)
    stages, total, ranks = len(tables.rank_of), len(chunks), len(tables.stages_of)
    columns, trains, items = tables.columns, tables.trains, stages * total
    is_split = rule.waiting is not None and trains
    times_us = columns.action_us
    backward_us = times_us[BACKWARD * items : WEIGHT * items]
    if is_split:
        backward_us = floats(np.concatenate([own.backward_us - own.saved_by_split_us for own in tables.passes]))
    alive = math.ceil(rule.window * ranks) + rule.slack
    limits = zip(window_ahead(groups, minimal=True), windows_of(groups), strict=True)
    ahead = [max(end, done + alive + window - 1) for done, (end, window) in enumerate(limits)]
    first_stage = [0, *accumulate(map(len, tables.stages_of))]
    passes = 2 if trains else 1
    return ready.Ready(
        num_chunks=total,
        rank_of=columns.rank_of,
        stages=integers(stage for own in tables.stages_of for stage in reversed(own)),
        first_stage=integers(first_stage),
        forward_us=times_us[FORWARD * items : BACKWARD * items],
        backward_us=backward_us,
        weight_us=times_us[WEIGHT * items :],
        hop_us=floats(np.concatenate([*tables.hops, tables.turn_us])),
        backwards=integers(descending(groups) if trains else []),
        ahead=integers([*ahead, total] if trains else [total] * (total + 1)),
        alternating=int(rule.alternating),
        most_waiting=max(1, math.ceil((rule.waiting or 0) * ranks)) if is_split else 0,
        forward_in=floats([0.0] * total + [math.inf] * (items - total)),
        backward_in=floats([math.inf] * items),
        forward_count=integer_zeros(stages),
        backward_count=integer_zeros(stages),
        clock_us=float_zeros(ranks),
        was_backward=integer_zeros(ranks),
        waiting_us=float_zeros(items if is_split else 0),
        queued=integer_zeros(ranks),
        taken=integer_zeros(ranks),
        out=integer_zeros(passes * items),
        filled=integers(passes * total * start for start in first_stage[:-1]),
    )
