"""Earliest starts of the actions of a chunk table, and their precedence as literals of the oracle's program.

Chunks cross no boundary out of turn (`check` forbids it), so all ranks run their forwards in one order and their backwards in
one order: those literals are shared. How the two interleave, and where weight gradients of their own run, is a matter of each
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.planner.exact.milp import ALWAYS, NEVER, Linear, Model, total
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.tables import Tables, Times

Item = tuple[Op, int]
"""An action of a given stage: its kind and chunk."""

Pairs = dict[tuple[Item, Item], Linear]

ROUNDING = 1e-9
"""Tolerance for sums of the same times in different orders."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Times ``[stage][chunk]`` in units of a horizon, for one stage on each rank.

    Whatever the order, a chunk comes through all earlier stages before it comes to a stage, a slice after the slices before
    it, and backwards the other way round.

    Attributes:
        forward, backward: least duration; a backward's is without recompute and without what can be split off.
        weight: of the weight gradient where it can be split off, else zero.
        layer: each recomputed layer adds.
        hop: message ``[boundary][chunk]``.
        forward_head, backward_head: earliest start.
        forward_tail, backward_tail: least time from the end of the action to the end of the last.
    """

    forward: Times
    backward: Times
    weight: Times
    layer: Times
    hop: Times
    forward_head: Times
    backward_head: Times
    forward_tail: Times
    backward_tail: Times

    @staticmethod
    def of(chunks: Sequence[Chunk], tables: Tables, horizon_us: float, split: bool) -> Windows:
        """Compute the windows of a chunk table.

        Args:
            chunks: the chunk table.
            tables: its times and sizes.
            horizon_us: the unit of all times.
            split: weight gradients can run as actions of their own, where anything is held for them.
        """

        def scaled(times: Times) -> Times:
            return [[time_us / horizon_us for time_us in row] for row in times]

        links = slice_neighbours(chunks)
        ascending = sorted(range(len(chunks)), key=lambda c: chunks[c].segments[0].start)
        forward, hop = scaled(tables.forward_us), scaled(tables.hops)
        rows = zip(tables.weight_us, tables.weight_bytes, strict=True)
        weight_us = [[time_us if split and held else 0.0 for time_us, held in zip(*row, strict=True)] for row in rows]
        weight = scaled(weight_us)
        backward = _plus(scaled(tables.backward_us), weight, -1.0)
        forward_head = _along(forward, hop, links.previous, ascending)
        backward_tail = _along(backward, hop, links.previous, ascending)
        descending = ascending[::-1]
        backward_head = _back(backward, hop, links.following, descending, _plus(forward_head, forward))
        forward_tail = _back(forward, hop, links.following, descending, _plus(backward_tail, backward))
        rest = backward, weight, scaled(tables.layer_us), hop
        return Windows(forward, *rest, forward_head, backward_head, forward_tail, backward_tail)

    def least(self, s: int, item: Item) -> float:
        """Least duration of an action."""
        op, c = item
        return {Op.F: self.forward, Op.B: self.backward}[op][s][c] if op is not Op.W else 0.0

    def head(self, s: int, item: Item) -> float:
        """Earliest start of an action."""
        op, c = item
        return (
            self.forward_head[s][c] if op is Op.F else self.backward_head[s][c] + (self.backward[s][c] if op is Op.W else 0.0)
        )

    def tail(self, s: int, item: Item) -> float:
        """Least time from an action's end to the end of all."""
        op, c = item
        return {Op.F: self.forward_tail, Op.B: self.backward_tail}[op][s][c] if op is not Op.W else 0.0


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
        root = _roots(self.chunks)
        shared: Pairs = {}
        for u, v in combinations(self.size, 2):
            for op in (Op.F, Op.B):
                if root[u] == root[v]:
                    earlier = self.chunks[u].segments[0].start < self.chunks[v].segments[0].start
                    literal = ALWAYS if earlier == (op is Op.F) else NEVER
                elif op is Op.F and self._whole(u, root) and self._whole(v, root) and self._profile(u) == self._profile(v):
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
        """A literal for a before b, settled where one of the two ways takes longer than the horizon."""
        if any(self._least(s, a, b) > 1.0 + ROUNDING for s in stages):
            return NEVER
        if any(self._least(s, b, a) > 1.0 + ROUNDING for s in stages):
            return ALWAYS
        return self.model.literal()

    def _least(self, s: int, a: Item, b: Item) -> float:
        """Least time in which a runs before b."""
        w = self.windows
        return w.head(s, a) + w.least(s, a) + w.least(s, b) + w.tail(s, b)

    def _whole(self, c: int, root: Sequence[int]) -> bool:
        return root.count(root[c]) == 1

    def _profile(self, c: int) -> tuple[float, ...]:
        t = self.tables
        times = [row[c] for row in (*t.forward_us, *t.backward_us, *t.layer_us, *t.weight_us, *t.hops)]
        kept = [row[c] for row in (*t.activation, *t.saved, *t.weight_bytes)]
        kept += [size for s in range(len(self.items)) for split in (False, True) for size in t.at_ends(s, c, split)]
        more = [row[c] for row in (*t.forward_alloc, *t.forward_free, *t.backward_residual)]
        return *times, *kept, *more

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


def _roots(chunks: Sequence[Chunk]) -> list[int]:
    """Map every chunk to the chunk with the first slice of its sequence, or to itself if it is not sliced."""
    previous = slice_neighbours(chunks).previous
    roots = list(range(len(chunks)))
    for c in range(len(chunks)):
        while (earlier := previous[roots[c]]) is not None:
            roots[c] = earlier
    return roots


def _along(times: Times, hop: Times, previous: Sequence[int | None], ascending: Sequence[int]) -> Times:
    """The longest way to every action through earlier stages and earlier slices."""
    ways: Times = []
    for stage, row in enumerate(times):
        way = [0.0] * len(row)
        for c in ascending:
            if stage:
                way[c] = ways[-1][c] + times[stage - 1][c] + hop[stage - 1][c]
            before = previous[c]
            if before is not None:
                way[c] = max(way[c], way[before] + row[before])
        ways.append(way)
    return ways


def _back(times: Times, hop: Times, following: Sequence[int | None], descending: Sequence[int], least: Times) -> Times:
    """The longest way to every action through later stages and later slices, and at least `least`."""
    ways = [list(row) for row in least]
    for stage in reversed(range(len(times))):
        for c in descending:
            if stage + 1 < len(times):
                ways[stage][c] = max(ways[stage][c], ways[stage + 1][c] + times[stage + 1][c] + hop[stage][c])
            after = following[c]
            if after is not None:
                ways[stage][c] = max(ways[stage][c], ways[stage][after] + times[stage][after])
    return ways


def _plus(one: Times, other: Times, sign: float = 1.0) -> Times:
    return [[a + sign * b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]
