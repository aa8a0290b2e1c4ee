"""Weight gradients split off their backwards: run where a rank would wait, at the latest when their memory is needed."""

from __future__ import annotations

from collections import deque

from megatron_epp.planner.evaluate import Layers, Player, backward_times
from megatron_epp.planner.ledger import Ledger
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Op


def split_weights(order: Order, tables: Tables, layers: Layers, caps: tuple[int, ...]) -> Order:
    """The same order with weight gradients as actions of their own.

    A backward then passes its gradient on sooner, and its weight gradient waits, first come first served, for a gap that it
    fits into: until the next action's input has arrived. Where what waits would lift the rank above its cap, it runs before;
    where even a single one would, the backward stays whole.

    Args:
        order: forwards and whole backwards that fit the caps with `layers`.

    Raises:
        PlanError: the order deadlocks.
    """
    backward = backward_times(tables, layers)
    split = [
        [whole - weight for whole, weight in zip(*rows, strict=True)] for rows in zip(backward, tables.weight_us, strict=True)
    ]
    filler = _Filler(order, tables, split)
    filler.whole = backward
    filler.room = [_room(actions, tables, rank, layers, caps[rank]) for rank, actions in enumerate(order)]
    filler.run()
    return tuple(map(tuple, filler.made))


def _room(actions: tuple[Action, ...], tables: Tables, rank: int, layers: Layers, cap: int) -> list[tuple[int, int]]:
    """For each action, the bytes left beside it, and what a backward without its weight gradient takes of them meanwhile."""
    ledger = Ledger.of(tables, rank)
    live = ledger.static
    room = []
    for op, stage, c in actions:
        item = ledger.number[stage] + c
        kept = ledger.kept(item, layers[stage][c])
        if op is Op.F:
            live += kept + ledger.forward_alloc[item]
            room.append((cap - live, 0))
            live -= ledger.forward_free[item]
        else:
            live -= kept
            own, held = ledger.own(item, layers[stage][c]), tables.weight_bytes[stage][c]
            room.append((cap - live - own, max(0, held - kept, ledger.net[item] + held - own)))
            live += ledger.net[item]
    return room


class _Filler(Player):
    """Plays an order and puts weight gradients in as it goes."""

    whole: list[list[float]]
    room: list[list[tuple[int, int]]]

    def __init__(self, order: Order, tables: Tables, backward_us: list[list[float]]) -> None:
        super().__init__(order, tables, backward_us, ())
        self.made: list[list[Action]] = [[] for _ in order]
        self.waiting: list[deque[Action]] = [deque() for _ in order]
        self.waiting_bytes = [0] * len(order)

    def _advance(self, rank: int) -> int:
        actions, end, room, waiting = self.order[rank], self.end[rank], self.room[rank], self.waiting[rank]
        first = at = len(end)
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
            begin = max(arrived, self.clock[rank])
            if op is Op.F:
                now = begin + self.tables.forward_us[stage][c]
                if stage + 1 < len(self.forward_in):
                    self.forward_in[stage + 1][c] = now + self.tables.hops[stage][c]
            else:
                now = begin + (self.backward_us if own <= free else self.whole)[stage][c]
                if own <= free:
                    waiting.append(Action(Op.W, stage, c))
                    self.waiting_bytes[rank] += self.tables.weight_bytes[stage][c]
                if stage:
                    self.backward_in[stage - 1][c] = now + self.tables.hops[stage - 1][c]
            self.clock[rank] = now
            end.append(now)
            at += 1
        while at == len(actions) and waiting:
            self._run_weight(rank)
        return at - first

    def _weight_us(self, action: Action) -> float:
        return self.tables.weight_us[action.stage][action.chunk]

    def _run_weight(self, rank: int) -> None:
        action = self.waiting[rank].popleft()
        self.made[rank].append(action)
        self.clock[rank] += self._weight_us(action)
        self.waiting_bytes[rank] -= self.tables.weight_bytes[action.stage][action.chunk]
