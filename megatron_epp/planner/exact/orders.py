"""Earliest starts of the actions of a chunk table, and their precedence as literals of the oracle's program.

Chunks cross no boundary out of turn (`check` forbids it), so all ranks run their forwards in one order and their backwards in
one order: those literals are shared. How the two interleave, and where weight gradients of their own run, is a matter of each
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.planner.exact.milp import ALWAYS, NEVER, Linear, Model, total
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.tables import Tables, Times

Item = tuple[Op, int]
"""An action of a given stage: its kind and chunk."""

Pairs = dict[tuple[Item, Item], Linear]
Array = NDArray[np.float64]

ROUNDING = 1e-9
"""Tolerance for sums of the same times in different orders."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Times in units of a horizon, for one stage on each rank.

    Whatever the order, a chunk comes through all earlier stages before it comes to a stage, a slice after the slices before
    it, and backwards the other way round.

    Attributes:
        least: least duration, by stage and item; a backward's is without recompute and without what can be split off.
        head: earliest start, by stage and item.
        tail: least time from the end of the action to the end of the last, by stage and item.
        weight: ``[stage][chunk]``, of the weight gradient where it can be split off, else zero.
        layer: ``[stage][chunk]``, each recomputed layer adds.
        hop: message ``[boundary][chunk]``.
    """

    least: list[dict[Item, float]]
    head: list[dict[Item, float]]
    tail: list[dict[Item, float]]
    weight: Times
    layer: Times
    hop: Times

    @staticmethod
    def of(chunks: Sequence[Chunk], tables: Tables, horizon_us: float, split: bool) -> Windows:
        """Compute the windows of a chunk table.

        Args:
            chunks: the chunk table.
            tables: its times and sizes.
            horizon_us: the unit of all times.
            split: weight gradients can run as actions of their own, where anything is held for them.
        """
        forward, whole, weight, layer, hop = (
            np.array(times) / horizon_us
            for times in (tables.forward_us, tables.backward_us, tables.weight_us, tables.layer_us, tables.hops)
        )
        weight *= np.array(tables.weight_bytes, dtype=bool) & split
        backward, none = whole - weight, np.zeros_like(whole)
        links = slice_neighbours(chunks)
        ascending = sorted(range(len(chunks)), key=lambda c: chunks[c].segments[0].start)
        forward_head = _longest(forward, hop, none, links.previous, ascending)
        backward_tail = _longest(backward, hop, none, links.previous, ascending)
        behind = links.following, ascending[::-1]
        backward_head = _longest(backward[::-1], hop[::-1], (forward_head + forward)[::-1], *behind)[::-1]
        forward_tail = _longest(forward[::-1], hop[::-1], (backward_tail + backward)[::-1], *behind)[::-1]
        return Windows(
            least=_by_item(forward, backward, none),
            head=_by_item(forward_head, backward_head, backward_head + backward),
            tail=_by_item(forward_tail, backward_tail, none),
            weight=weight.tolist(),
            layer=layer.tolist(),
            hop=hop.tolist(),
        )


class Orders:
    """Literals of precedence, and the rows that make them an order.

    Attributes:
        items: the actions of every stage.
        before: for every stage and pair of its actions, a literal that the first runs before the second.
        split: ``[stage][chunk]``, a literal that the weight gradient is an action of its own. Where it may be but is not, its
            item is there all the same, takes no time and follows its backward at once.
    """

    def __init__(self, model: Model, chunks: Sequence[Chunk], tables: Tables, windows: Windows) -> None:
        self.model, self.chunks, self.tables, self.windows = model, chunks, tables, windows
        self.size = range(len(chunks))
        stages = range(len(tables.rank_of))
        self.split = [[model.literal() if windows.weight[s][c] > 0.0 else NEVER for c in self.size] for s in stages]
        own = [[(Op.W, c) for c in self.size if not self.split[s][c].never] for s in stages]
        both = [*((Op.F, c) for c in self.size), *((Op.B, c) for c in self.size)]
        self.items: list[list[Item]] = [[*both, *weights] for weights in own]
        shared = self._shared()
        self.before: list[Pairs] = []
        for s in stages:
            self.before.append(dict(shared))
            self._interleave(s)
            self._place_weights(s)
            self._transitive(s)

    def _shared(self) -> Pairs:
        """One literal for the forwards and one for the backwards of two chunks.

        Settled for slices of one sequence, for forwards of chunks that are equal in everything, and where one of the two ways
        takes longer than the horizon.
        """
        root = [chunk.segments[0].sequence for chunk in self.chunks]  # a slice is the first segment of its chunk
        shared: Pairs = {}
        for u, v in combinations(self.size, 2):
            for op in (Op.F, Op.B):
                if root[u] == root[v]:
                    earlier = self.chunks[u].segments[0].start < self.chunks[v].segments[0].start
                    literal = ALWAYS if earlier == (op is Op.F) else NEVER
                elif op is Op.F and root.count(root[u]) == root.count(root[v]) == 1 and self._profile(u) == self._profile(v):
                    literal = ALWAYS
                else:
                    literal = self._possible((op, u), (op, v), range(len(self.items)))
                _enter(shared, (op, u), (op, v), literal)
        return shared

    def _interleave(self, s: int) -> None:
        """A forward before another forward is before that one's backward too; a backward likewise."""
        before, row = self.before[s], self.model.at_least
        for u in self.size:
            _enter(before, (Op.F, u), (Op.B, u), ALWAYS)
            for v in self.size:
                if u == v:
                    continue
                ahead, behind = before[(Op.F, u), (Op.F, v)], before[(Op.B, u), (Op.B, v)]
                settled = ahead.always or behind.always
                passed = ALWAYS if settled else self._possible((Op.F, u), (Op.B, v), [s])
                _enter(before, (Op.F, u), (Op.B, v), passed)
                row(passed - ahead)
                row(passed - behind)
                if s:  # what has come as far as this stage passed the one before even earlier
                    row(self.before[s - 1][(Op.F, u), (Op.B, v)] - passed)

    def _place_weights(self, s: int) -> None:
        before, row = self.before[s], self.model.at_least
        weights = [c for op, c in self.items[s] if op is Op.W]
        for u in weights:
            _enter(before, (Op.B, u), (Op.W, u), ALWAYS)
            _enter(before, (Op.F, u), (Op.W, u), ALWAYS)
            for op, v in self.items[s]:
                if v != u and op is not Op.W:
                    behind = before[(Op.B, u), (op, v)]
                    _enter(before, (Op.W, u), (op, v), NEVER if behind.never else self.model.literal())
        for u, v in combinations(weights, 2):
            _enter(before, (Op.W, u), (Op.W, v), self.model.literal())
        for u in weights:
            for item in self.items[s]:
                if item[1] != u:
                    mine, backward = before[(Op.W, u), item], before[(Op.B, u), item]
                    row(backward - mine)
                    row(mine - backward + self.split[s][u])

    def _transitive(self, s: int) -> None:
        """No three actions in a circle."""
        before = self.before[s]
        for a, b, c in combinations(self.items[s], 3):
            if s and a[0] is b[0] is c[0] and a[0] is not Op.W:  # shared, so said on stage 0
                continue
            for circle in ((before[a, b], before[b, c], before[c, a]), (before[a, c], before[c, b], before[b, a])):
                if not any(literal.never for literal in circle):
                    self.model.at_most(total(circle), 2.0)

    def _possible(self, a: Item, b: Item, stages: Iterable[int]) -> Linear:
        """A literal for a before b, settled where one of the two ways takes longer than the horizon.

        Args:
            a, b: operations and chunks.
            stages: on which the order of both is the same.
        """
        if any(self._least(s, a, b) > 1.0 + ROUNDING for s in stages):
            return NEVER
        if any(self._least(s, b, a) > 1.0 + ROUNDING for s in stages):
            return ALWAYS
        return self.model.literal()

    def _least(self, s: int, a: Item, b: Item) -> float:
        """Least time in which a runs before b.

        Args:
            s: the stage.
            a, b: operations and chunks.
        """
        w = self.windows
        return w.head[s][a] + w.least[s][a] + w.least[s][b] + w.tail[s][b]

    def _profile(self, c: int) -> tuple[float, ...]:
        t = self.tables
        times = *t.forward_us, *t.backward_us, *t.layer_us, *t.weight_us, *t.hops
        sizes = *t.activation, *t.saved, *t.weight_bytes, *t.forward_alloc, *t.forward_free, *t.backward_residual
        ends = [size for s in range(len(self.items)) for split in (False, True) for size in t.at_ends(s, c, split)]
        return *(row[c] for row in times), *(row[c] for row in sizes), *ends

    def order(self, values: Sequence[float]) -> Order:
        """The order of a solution."""
        return tuple(tuple(self._actions(s, values)) for s in range(len(self.items)))

    def _actions(self, s: int, values: Sequence[float]) -> Iterator[Action]:
        items = [(op, c) for op, c in self.items[s] if op is not Op.W or self.split[s][c].holds(values)]
        rank_in_order = {b: sum(self.before[s][a, b].holds(values) for a in items if a != b) for b in items}
        return (Action(op, s, c) for op, c in sorted(items, key=lambda item: rank_in_order[item]))


def _enter(table: Pairs, a: Item, b: Item, literal: Linear) -> None:
    table[a, b] = literal
    table[b, a] = NEVER if literal.always else ALWAYS if literal.never else ~literal


def _by_item(forward: Array, backward: Array, weight: Array) -> list[dict[Item, float]]:
    kinds = {Op.F: forward.tolist(), Op.B: backward.tolist(), Op.W: weight.tolist()}
    return [{(op, c): value for op, rows in kinds.items() for c, value in enumerate(rows[s])} for s in range(len(forward))]


def _longest(times: Array, hop: Array, least: Array, near: Sequence[int | None], walk: Sequence[int]) -> Array:
    """Compute the longest way to every action through the stages above it and the slices that come before it.

    Args:
        times: of the actions ``[stage][chunk]``.
        hop: of the messages ``[boundary][chunk]``.
        least: of every way ``[stage][chunk]``.
        near: of every chunk, the slice just before it.
        walk: the chunks, each after the slices before it.
    """
    ways = least.copy()
    for stage, way in enumerate(ways):
        for c in walk:
            if stage:
                way[c] = max(way[c], ways[stage - 1, c] + times[stage - 1, c] + hop[stage - 1, c])
            before = near[c]
            if before is not None:
                way[c] = max(way[c], way[before] + times[stage, before])
    return ways
