"""Split weight gradients: run where a rank would wait, at the latest when their memory is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.planner.evaluate import RecomputeSteps, backward_times, play
from megatron_epp.planner.kernels.compiled import integers, numbers
from megatron_epp.planner.kernels.memory import split_peaks
from megatron_epp.planner.memory.offload import Offload, away_bytes, peaks_with_copies, timed
from megatron_epp.planner.memory.recompute import held_bytes, peaks_of, step_bytes
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.tables import Tables

ROUNDS = 8
"""Rounds in which fewer weight gradients are delayed, where the order is overlapped with copies."""


def split_weights(
    order: Order, tables: Tables, recompute_steps: RecomputeSteps, caps: Sequence[int], away: Sequence[Sequence[int]] = ()
) -> Order:
    """Split the weight gradients off the backwards of an order.

    A backward then passes its gradient on sooner, and its weight gradient waits, first come first served, for a gap that it
    fits into: until the next action's input has arrived. Where the waiting ones would lift the rank above its cap, they run
    before; where even a single one would, the backward stays whole, as does one without anything to delay (`_puts_off`).

    Args:
        order: forwards and whole backwards that fit the caps with `recompute_steps`.
        tables: times and sizes of the chunks.
        recompute_steps: recompute ``[stage][chunk]``.
        caps: bytes of the ranks.
        away: bytes that copies have taken away while each action runs, ``[rank][position]``; empty where there are none.

    Raises:
        PlanError: the order deadlocks.
    """
    return _Filler(order, tables, recompute_steps, _room(order, tables, recompute_steps, caps, away)).run()


def with_split_weights(order: Order, tables: Tables, made: Offload, caps: tuple[int, ...], enough_us: float = 0.0) -> Order:
    """Split weight gradients off where that is faster; return the faster order.

    They wait as the caps let them, and where that takes longer than `enough_us`, within the peaks of whole backwards: then they
    run sooner, which may be faster.

    Args:
        order: forwards and whole backwards that fit the caps.
        tables: times and sizes of the chunks.
        made: recompute and copies that the order is overlapped with.
        caps: bytes of the ranks.
        enough_us: makespan at which no further order is tried.
    """
    copies = timed(made, tables)

    def time_us(tried: Order) -> float:
        return play(tried, tables, made.recompute_steps, copies).makespan_us

    best, best_us = order, time_us(order)
    own = tuple(map(min, caps, peaks(order, tables, made)))
    for aims in dict.fromkeys((caps, own)):
        split = split_with_copies(order, tables, made, aims)
        if split is not None and (took_us := time_us(split)) < best_us:
            best, best_us = split, took_us
        if best_us <= enough_us:
            break
    return best


def split_with_copies(order: Order, tables: Tables, made: Offload, caps: tuple[int, ...]) -> Order | None:
    """Split weight gradients off an order, which may be overlapped with copies.

    The copies start at the ends of the same actions, as soon as their links are free. With the bytes that waiting gradients
    hold, and with the times that follow, a rank may come out above its cap; then fewer wait, each time twice as many fewer as
    seems needed.

    Args:
        order, tables, made, caps: as for `with_split_weights`.

    Returns:
        the order, or None if a rank is above its cap after all rounds.
    """
    if not made.copies:
        return split_weights(order, tables, made.recompute_steps, caps)
    before = play(order, tables, made.recompute_steps, copies := timed(made, tables))
    away, aims = away_bytes(tables, made, before), list(caps)
    for again in range(ROUNDS):
        split = split_weights(order, tables, made.recompute_steps, aims, away)
        after = play(split, tables, made.recompute_steps, copies)
        above = [peak - cap for peak, cap in zip(peaks_with_copies(split, tables, made, after), caps, strict=True)]
        if max(above) <= 0:
            return split
        aims = [aim - max(0, over << again) for aim, over in zip(aims, above, strict=True)]
    return None


def peaks(order: Order, tables: Tables, made: Offload) -> list[int]:
    """Compute the most bytes that each rank holds, with the copies that the order is overlapped with.

    Args:
        order, tables, made: as for `with_split_weights`.
    """
    if made.copies:
        return peaks_with_copies(order, tables, made, play(order, tables, made.recompute_steps, timed(made, tables)))
    return peaks_of(held_bytes(order, tables, made.recompute_steps))


def _room(
    order: Order, tables: Tables, recompute_steps: RecomputeSteps, caps: Sequence[int], away: Sequence[Sequence[int]]
) -> list[list[tuple[int, int]]]:
    """Compute for each action the free bytes and the extra bytes of its backward with a split weight gradient."""
    found = []
    held, sizes = held_bytes(order, tables, recompute_steps), step_bytes(order, tables, recompute_steps)
    chunks, steps = tables.columns.num_chunks, integers(chain.from_iterable(recompute_steps))
    peaks_of_items = integers([0] * len(steps))
    split_peaks(tables.columns, steps, peaks_of_items)
    rises = numbers(peaks_of_items)
    for rank, (actions, takes, gives) in enumerate(zip(order, *sizes, strict=True)):
        left = caps[rank] - held[rank] + np.array(away[rank] if away else 0)
        row = []
        for (op, stage, c), free, taken, given in zip(actions, left.tolist(), takes, gives, strict=True):
            extra = 0
            if op is Op.B:
                extra = max(0, rises[stage * chunks + c] - taken, tables.weight_bytes[stage][c] - given)
            row.append((free, extra))
        found.append(row)
    return found


def _puts_off(tables: Tables, stage: int, c: int) -> bool:
    """True if a backward has a weight gradient to delay: it takes time, and leaves it bytes if its chunk keeps any.

    The backward of a stage without layers has none, and would leave nothing for a W to read.
    """
    keeps = tables.activation[stage][c] + tables.forward_alloc[stage][c] > 0
    return tables.weight_us[stage][c] > 0 and (tables.weight_bytes[stage][c] > 0 or not keeps)


class _Filler:
    """Plays an order and puts weight gradients in as it goes."""

    def __init__(
        self, order: Order, tables: Tables, recompute_steps: RecomputeSteps, room: list[list[tuple[int, int]]]
    ) -> None:
        self.order, self.tables, self.room = order, tables, room
        self.whole = backward_times(tables, recompute_steps)
        self.split = [
            [whole - weight for whole, weight in zip(*rows, strict=True)]
            for rows in zip(self.whole, tables.weight_us, strict=True)
        ]
        stages, chunks = len(tables.rank_of), len(tables.message_us)
        # When the input of an action has arrived; None while it has not.
        self.forward_in: list[list[float | None]] = [[None if stage else 0.0] * chunks for stage in range(stages)]
        self.backward_in: list[list[float | None]] = [
            [0.0 if stage == stages - 1 else None] * chunks for stage in range(stages)
        ]
        self.at, self.clock = [0] * len(order), [0.0] * len(order)
        self.made: list[list[Action]] = [[] for _ in order]
        self.waiting: list[deque[Action]] = [deque() for _ in order]
        self.waiting_bytes = [0] * len(order)

    def run(self) -> Order:
        moved = 1
        while moved:
            moved = sum(self._advance(rank) for rank in range(len(self.order)))
        if any(at < len(actions) for at, actions in zip(self.at, self.order, strict=True)):
            raise PlanError("the order deadlocks before any weight gradient is split off")
        return tuple(map(tuple, self.made))

    def _advance(self, rank: int) -> int:
        """Run a rank as far as it goes; how many actions that were."""
        actions, room, waiting = self.order[rank], self.room[rank], self.waiting[rank]
        first = at = self.at[rank]
        while at < len(actions):
            op, stage, c = action = actions[at]
            arrived = (self.forward_in if op is Op.F else self.backward_in)[stage][c]
            if arrived is None:
                break
            free, own = room[at]
            while waiting and (
                self.waiting_bytes[rank] + own > free or self.clock[rank] + self._weight_us(waiting[0]) <= arrived
            ):
                self._run_weight(rank)
            self.made[rank].append(action)
            self.clock[rank] = max(arrived, self.clock[rank])
            if op is Op.F:
                self._forward(rank, stage, c)
            else:
                self._backward(rank, stage, c, own <= free and _puts_off(self.tables, stage, c))
            at += 1
        self.at[rank] = at
        while at == len(actions) and waiting:
            self._run_weight(rank)
        return at - first

    def _forward(self, rank: int, stage: int, c: int) -> None:
        self.clock[rank] += self.tables.forward_us[stage][c]
        if stage + 1 < len(self.forward_in):
            self.forward_in[stage + 1][c] = self.clock[rank] + self.tables.hops[stage][c]

    def _backward(self, rank: int, stage: int, c: int, split: bool) -> None:
        self.clock[rank] += (self.split if split else self.whole)[stage][c]
        if split:
            self.waiting[rank].append(Action(Op.W, stage, c))
            self.waiting_bytes[rank] += self.tables.weight_bytes[stage][c]
        if stage:
            self.backward_in[stage - 1][c] = self.clock[rank] + self.tables.hops[stage - 1][c]

    def _weight_us(self, action: Action) -> float:
        return self.tables.weight_us[action.stage][action.chunk]

    def _run_weight(self, rank: int) -> None:
        action = self.waiting[rank].popleft()
        self.made[rank].append(action)
        self.clock[rank] += self._weight_us(action)
        self.waiting_bytes[rank] -= self.tables.weight_bytes[action.stage][action.chunk]
