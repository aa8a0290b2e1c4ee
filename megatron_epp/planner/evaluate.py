"""How good an order is, without building a plan: the same arithmetic as `simulate`, reduced to what a search asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Sizes, Tables, Times
from megatron_epp.schedule import Action, Op, PlanError

Layers = Sizes
"""Recomputed layers, ``[stage][chunk]``."""

Copies = Sequence[Sequence[tuple[Action, float]]]
"""Offloads and loads of every rank in order, each with its time."""


@dataclass(frozen=True, slots=True)
class Played:
    """Times of an order, ``[rank][position]``."""

    start_us: Times
    end_us: Times
    copy_start_us: Times
    copy_end_us: Times

    @property
    def makespan_us(self) -> float:
        return max((row[-1] for row in self.end_us if row), default=0.0)


def backward_times(tables: Tables, layers: Layers, order: Order = ()) -> Times:
    """Backward times with recompute, ``[stage][chunk]``; no rows in a forward-only plan.

    Args:
        order: where it has a weight gradient as an action of its own, the backward does not count it.
    """
    if not tables.backward_us:
        return []
    times = [
        [base + count * layer for base, count, layer in zip(*rows, strict=True)]
        for rows in zip(tables.backward_us, layers, tables.layer_us, strict=True)
    ]
    for stage, c in split_off(order):
        times[stage][c] -= tables.weight_us[stage][c]
    return times


def split_off(order: Order) -> set[tuple[int, int]]:
    """Stage and chunk of every weight gradient that is an action of its own."""
    weight = Op.W
    return {(stage, c) for actions in order for op, stage, c in actions if op is weight}


def moved_bytes(tables: Tables, layers: Layers, stage: int, c: int, share: float) -> int:
    """What an offload of a share of a chunk's kept bytes moves."""
    return int((tables.activation[stage][c] - layers[stage][c] * tables.saved[stage][c]) * share)


def makespan_us(order: Order, tables: Tables, layers: Layers) -> float:
    """End of the last action, equal to what `simulate` says of the plan. Raises `PlanError` when the order deadlocks."""
    return play(order, tables, layers).makespan_us


def play(order: Order, tables: Tables, layers: Layers, copies: Copies = ()) -> Played:
    """Time an order, for any placement, with or without weight gradients of their own and copies.

    The order must have the slices of a sequence ascending in forward and descending in backward on every rank, which is then
    all they ask for; `check` has the last word on that.

    Raises:
        PlanError: the order deadlocks.
    """
    return Player(order, tables, backward_times(tables, layers, order), copies).run()


class Player:
    def __init__(self, order: Order, tables: Tables, backward_us: Times, copies: Copies) -> None:
        stages, chunks = len(tables.rank_of), len(tables.message_us)
        self.order, self.tables, self.copies = order, tables, copies
        self.backward_us = backward_us
        # When the input of an action has arrived; None while it has not.
        self.forward_in: list[list[float | None]] = [[None if stage else 0.0] * chunks for stage in range(stages)]
        self.backward_in: list[list[float | None]] = [
            [0.0 if stage == stages - 1 else None] * chunks for stage in range(stages)
        ]
        self.start: Times = [[] for _ in order]
        self.end: Times = [[] for _ in order]
        self.copying = [_Copying(row) for row in copies]
        self.clock = [0.0] * len(order)

    def run(self) -> Played:
        order = self.order
        ranks = list(range(len(order)))
        left = sum(map(len, order))
        while left:
            before = left
            for rank in ranks:
                left -= self._advance(rank)
            if left == before:
                heads = [str(row[len(done)]) for row, done in zip(order, self.end, strict=True) if len(done) < len(row)]
                raise PlanError(f"the order deadlocks; the ranks that are not done wait at {', '.join(heads)}")
            ranks.reverse()
        for copying in self.copying:
            copying.finish()
        return Played(self.start, self.end, [row.start for row in self.copying], [row.end for row in self.copying])

    def _advance(self, rank: int) -> int:
        """Run a rank as far as it goes; how many actions that were."""
        actions, start, end = self.order[rank], self.start[rank], self.end[rank]
        first = at = len(end)
        size = len(actions)
        now = self.clock[rank]
        forward_in, backward_in, hops = self.forward_in, self.backward_in, self.tables.hops
        forward_us, backward_us, weight_us = self.tables.forward_us, self.backward_us, self.tables.weight_us
        last = len(forward_in) - 1
        copying = self.copying[rank] if self.copying else None
        forward, weight = Op.F, Op.W
        while at < size:
            op, stage, c = actions[at]
            if op is forward:
                arrived = forward_in[stage][c]
                if arrived is None:
                    break
                begin = arrived if arrived > now else now
                now = begin + forward_us[stage][c]
                if stage < last:
                    forward_in[stage + 1][c] = now + hops[stage][c]
                if copying is not None:
                    copying.offloadable(stage, c, now)
            elif op is weight:
                begin = now
                now += weight_us[stage][c]
            else:
                arrived = backward_in[stage][c]
                if arrived is None:
                    break
                begin = arrived if arrived > now else now
                if copying is not None:
                    begin = max(begin, copying.loaded(stage, c))
                now = begin + backward_us[stage][c]
                if stage:
                    backward_in[stage - 1][c] = now + hops[stage - 1][c]
            start.append(begin)
            end.append(now)
            at += 1
        self.clock[rank] = now
        return at - first


class _Copying:
    """The copies of one rank: one at a time in their order, an offload not before its forward has ended."""

    def __init__(self, row: Sequence[tuple[Action, float]]) -> None:
        self.row = row
        self.ended: dict[tuple[int, int], float] = {}
        self.place = {(action.stage, action.chunk): at for at, (action, _) in enumerate(row) if action.op is Op.L}
        self.start: list[float] = []
        self.end: list[float] = []

    def offloadable(self, stage: int, c: int, now: float) -> None:
        self.ended[stage, c] = now

    def loaded(self, stage: int, c: int) -> float:
        """When a chunk is back; zero when it never left."""
        place = self.place.get((stage, c))
        if place is None:
            return 0.0
        self._upto(place + 1)
        return self.end[place]

    def finish(self) -> None:
        self._upto(len(self.row))

    def _upto(self, count: int) -> None:
        now = self.end[-1] if self.end else 0.0
        for action, took_us in self.row[len(self.end) : count]:
            if action.op is Op.O:
                ended = self.ended.get((action.stage, action.chunk))
                if ended is None:
                    raise PlanError(f"the order deadlocks: {action} stands before a load that an earlier backward waits for")
                now = max(now, ended)
            self.start.append(now)
            now += took_us
            self.end.append(now)
