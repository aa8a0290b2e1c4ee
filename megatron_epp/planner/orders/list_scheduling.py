"""List scheduling: an order for any placement, made by running the pipeline and letting every rank take what is ready."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.planner.orders.warm_up import Order, slice_groups
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables


@dataclass(frozen=True, slots=True)
class ListScheduling:
    """Order rule for any placement: a free rank takes what is ready, deepest stage first.

    Of a forward and a backward that are both ready it takes the backward, or with `alternating` the kind that it did not run
    last. The first keeps less alive, the second lets ranks starve less; which is faster depends on the batch.

    Every stage runs forwards in the order of the table and backwards sequence by sequence with descending slices, so messages
    never cross. A rank starts no further chunk on its first stage while `window` times the ranks (plus the slices of the
    sequence whose backward is next, less one) are between forward and backward there, unless the next backward needs it. So
    there is no deadlock: the forwards that the next backward waits for are always allowed.

    With `waiting` weight gradients run apart from their backwards, where nothing else is ready or that many wait. They shape
    the order and are not in it: where they run is decided once the order is known to fit (`orders.split_weight`).

    Attributes:
        window: chunks alive on a rank's first stage, in multiples of the ranks.
        alternating: take forwards and backwards in turn where both are ready.
        waiting: weight gradients that may wait on a rank, in multiples of the ranks; None runs them with their backwards.
        slack: further chunks alive, as in `WarmUp`.
    """

    window: float
    alternating: bool = False
    waiting: float | None = None
    slack: int = 0

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        return _Run(chunks, tables, self).run()


class _Run:
    def __init__(self, chunks: Sequence[Chunk], tables: Tables, rule: ListScheduling) -> None:
        groups = slice_groups(chunks)
        stages, total, ranks = len(tables.rank_of), len(chunks), len(tables.stages_of)
        self.tables, self.total, self.turn_us = tables, total, tables.turn_us
        self.descending = [c for group in groups for c in reversed(group)]
        self.is_alternating = rule.alternating
        self.is_split = rule.waiting is not None and bool(tables.backward_us)
        self.backward_us = tables.input_us if self.is_split else tables.backward_us
        self.most_waiting = max(1, math.ceil((rule.waiting or 0) * ranks))
        alive = math.ceil(rule.window * ranks) + rule.slack
        ends = [group.stop for group in groups for _ in group]
        sizes = [len(group) for group in groups for _ in group]
        # Forwards that the first stage of a rank may have run when it has run so many backwards.
        ahead = [max(end, done + alive + size - 1) for done, (end, size) in enumerate(zip(ends, sizes, strict=True))]
        self.ahead = [*ahead, total] if tables.backward_us else [total] * (total + 1)
        self.forward_in: list[list[float]] = [[math.inf if stage else 0.0] * total for stage in range(stages)]
        self.backward_in: list[list[float]] = [[math.inf] * total for _ in range(stages)]
        self.forwards, self.backwards = [0] * stages, [0] * stages
        self.clock = [0.0] * ranks
        self.made: list[list[Action]] = [[] for _ in range(ranks)]
        self.is_backward_last = [False] * ranks
        self.waiting: list[deque[float]] = [deque() for _ in range(ranks)]  # times of weight gradients

    def run(self) -> Order:
        events = [(0.0, rank) for rank in range(len(self.made))]
        while events:
            now, rank = heapq.heappop(events)
            if now < self.clock[rank]:
                continue
            taken = self._take(rank, now)
            if taken is not None:
                heapq.heappush(events, (self.clock[rank], rank))
                if taken[1] != rank or taken[0] > self.clock[rank]:
                    heapq.heappush(events, (max(taken[0], self.clock[taken[1]]), taken[1]))
        return tuple(map(tuple, self.made))

    def _take(self, rank: int, now: float) -> tuple[float, int] | None:
        """Run a ready action on a free rank. Return when its result arrives and at which rank; None if no action is ready."""
        waiting = self.waiting[rank]
        if len(waiting) >= self.most_waiting:
            return self._weight(rank, now)
        if self.is_alternating and self.is_backward_last[rank]:
            found = self._forward(rank, now) or self._backward(rank, now)
        else:
            found = self._backward(rank, now) or self._forward(rank, now)
        return self._weight(rank, now) if found is None and waiting else found

    def _forward(self, rank: int, now: float) -> tuple[float, int] | None:
        """Run a ready forward, as `_take`."""
        stages = self.tables.stages_of[rank]
        for stage in reversed(stages):
            c = self.forwards[stage]
            if c == self.total or self.forward_in[stage][c] > now:
                continue
            if stage == stages[0] and c >= self.ahead[self.backwards[stage]]:
                continue
            self.forwards[stage] += 1
            self.is_backward_last[rank] = False
            end = self.clock[rank] = now + self.tables.forward_us[stage][c]
            self.made[rank].append(Action(Op.F, stage, c))
            if stage + 1 == len(self.forward_in):
                arrives = self.backward_in[stage][c] = end + self.turn_us[c]
                return arrives, rank
            arrives = self.forward_in[stage + 1][c] = end + self.tables.hops[stage][c]
            return arrives, self.tables.rank_of[stage + 1]
        return None

    def _backward(self, rank: int, now: float) -> tuple[float, int] | None:
        """Run a ready backward, as `_take`."""
        for stage in reversed(self.tables.stages_of[rank]) if self.backward_us else ():
            done = self.backwards[stage]
            if done == self.total or self.backward_in[stage][c := self.descending[done]] > now:
                continue
            self.backwards[stage] += 1
            self.is_backward_last[rank] = True
            end = self.clock[rank] = now + self.backward_us[stage][c]
            self.made[rank].append(Action(Op.B, stage, c))
            if self.is_split:
                self.waiting[rank].append(self.tables.weight_us[stage][c])
            if not stage:
                return end, rank
            arrives = self.backward_in[stage - 1][c] = end + self.tables.hops[stage - 1][c]
            return arrives, self.tables.rank_of[stage - 1]
        return None

    def _weight(self, rank: int, now: float) -> tuple[float, int]:
        """Run the weight gradient that has waited longest, as `_take`."""
        end = self.clock[rank] = now + self.waiting[rank].popleft()
        return end, rank
