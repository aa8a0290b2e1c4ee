"""Offload in the oracle's program: what goes to the host and back, on each rank's link, in which order and how much of it.

With copies, what is live depends on times and not on the order alone. Nothing in a plan waits but for what it needs: actions
and copies start as soon as they can. So every start is tied to the end of something that it waits for (`_tied`), and a load,
which waits for nothing but the copies listed before it, can only be held back by an offload that waits for its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import permutations

from megatron_epp.planner.assemble import Decisions
from megatron_epp.planner.milp import ALWAYS, NEVER, Linear, total
from megatron_epp.planner.oracle_memory import Moment
from megatron_epp.planner.oracle_model import OracleModel
from megatron_epp.planner.oracle_windows import Item
from megatron_epp.planner.problem import Options
from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Op

MARGIN = 1e-5
"""Share of the horizon by which a copy must end before an action starts, or start after it does, to count as such."""
BUMPS = (0.0, 2e-6, 1e-5)
"""Shares of the cap by which copies are made larger where they fall short by the solver's tolerance."""

Pairs = dict[tuple[Item, Item], Linear]


def copied(tables: Tables, options: Options) -> bool:
    """Whether there is anything to offload with."""
    return options.offload and tables.host_us_per_byte < float("inf") and tables.offloadable_share > 0.0


class Copies:
    """The copies of all ranks whose cap can bind.

    Attributes:
        of: `RankCopies` by rank.
    """

    def __init__(self, written: OracleModel, tables: Tables, caps: Sequence[int], horizon_us: float) -> None:
        """Add them to a program, and the account of memory with them."""
        self.of = {s: RankCopies(written, tables, s, caps[s], horizon_us) for s in written.stages if written.memory.binds(s)}
        for s in written.stages if self.of else ():
            for item in written.orders.items[s]:
                _tied(written, s, item, self.of[s].returns(item) if s in self.of else [])
        for copies in self.of.values():
            copies.hold()

    def added(self, made: Decisions, values: Sequence[float]) -> Iterator[Decisions]:
        """Decisions with the copies of a solution, and with copies a little larger."""
        for bump in BUMPS:
            shares = [[0.0] * len(made.chunks) for _ in made.order]
            rows: list[tuple[Action, ...]] = [() for _ in made.order]
            for s, copies in self.of.items():
                rows[s] = copies.order(values)
                shares[s] = copies.shares(values, made.layers[s], bump)
            if any(rows):
                yield replace(made, copies=tuple(rows), offload=tuple(map(tuple, shares)))
            else:
                yield made


def _tied(written: OracleModel, s: int, item: Item, returns: list[tuple[Linear, Linear]]) -> None:
    """An action starts no later than the last of what it waits for: its input, what ran before it, and its load.

    Args:
        returns: literal and end of the load.
    """
    op, c = item
    model, start, hop = written.model, written.start[s][item], written.windows.hop
    reasons = list(returns)
    if op is Op.F:
        reasons.append((ALWAYS, written.end(s - 1, item) + hop[s - 1][c] if s else NEVER))
    elif op is Op.B and s + 1 < len(written.stages):
        reasons.append((ALWAYS, written.end(s + 1, item) + hop[s][c]))
    reasons += [
        (before, written.end(s, other))
        for other in written.orders.items[s]
        if other != item and not (before := written.orders.before[s][other, item]).never
    ]
    ties = []
    for holds, end in reasons:
        tie = model.literal()
        model.at_most(tie - holds)
        model.at_most(start - end - ~tie)
        ties.append(tie)
    model.at_least(total(ties), 1.0)


class RankCopies:
    """The copies of one rank.

    Attributes:
        goes: by chunk, whether anything of it is copied.
        moved: by chunk, how much, as a share of the cap.
        took: by chunk, how long each way.
        start: of every copy.
        first: of two copies, whether both are made, the first one before the other.
    """

    def __init__(self, written: OracleModel, tables: Tables, s: int, cap: int, horizon_us: float) -> None:
        self.written, self.tables, self.s, self.cap = written, tables, s, cap
        self.model, self.memory, self.windows = written.model, written.memory, written.windows
        latency, rate = tables.host_latency_us / horizon_us, tables.host_us_per_byte * cap / horizon_us
        self.most = [tables.offloadable_share * size for size in self.memory.sizes["activation"][s]]
        self.goes: list[Linear] = []
        self.moved: list[Linear] = []
        for c in written.size:
            forward_end = self.windows.head(s, (Op.F, c)) + self.windows.least(s, (Op.F, c))
            in_time = forward_end + 2 * latency <= 1.0 - self.windows.tail(s, (Op.B, c)) - self.windows.least(s, (Op.B, c))
            self.goes.append(self.model.literal() if in_time and self.most[c] > 0.0 else NEVER)
            self.moved.append(self.model.variable(0.0, self.most[c]))
            self.model.at_most(self.moved[c] - tables.offloadable_share * self.memory.kept(s, c))
            self.model.at_most(self.moved[c] - self.most[c] * self.goes[c])
        self.took = [latency * self.goes[c] + rate * self.moved[c] for c in written.size]
        self.items: list[Item] = [(op, c) for op in (Op.O, Op.L) for c in written.size if not self.goes[c].never]
        self.start = {item: self.model.variable(0.0, 1.0) for item in self.items}
        self.late = cache(self._late)
        self.done = cache(self._done)
        self._chains()
        self.first = self._turns()
        self._ties()

    def returns(self, item: Item) -> list[tuple[Linear, Linear]]:
        """What an action waits for because of copies: the literal that it does, and until when."""
        op, c = item
        return [] if op is not Op.B or self.goes[c].never else [(self.goes[c], self._end((Op.L, c)))]

    def _end(self, item: Item) -> Linear:
        return self.start[item] + self.took[item[1]]

    def _chains(self) -> None:
        """Forward, offload, load, backward."""
        start, end = self.written.start[self.s], self.written.end
        for op, c in self.items:
            if op is Op.O:
                self.model.at_least(self.start[Op.O, c] - end(self.s, (Op.F, c)) + ~self.goes[c])
                self.model.at_least(self.start[Op.L, c] - self._end((Op.O, c)) + ~self.goes[c])
                self.model.at_least(start[Op.B, c] - self._end((Op.L, c)) + ~self.goes[c])

    def _turns(self) -> Pairs:
        """One copy at a time."""
        model, first = self.model, Pairs()
        for a, b in permutations(self.items, 2):
            if a[1] == b[1]:
                first[a, b] = self.goes[a[1]] if a[0] is Op.O else NEVER
            else:
                first[a, b] = model.literal()
        for a, b in permutations(self.items, 2):
            both = first[a, b] + first[b, a]
            model.at_least(both - self.goes[a[1]] - self.goes[b[1]], -1.0)
            model.at_most(both - self.goes[a[1]])
            model.at_least(self.start[b] - self._end(a) + ~first[a, b])
        for a, b, c in permutations(self.items, 3):
            model.at_most(first[a, b] + first[b, c] - first[a, c], 1.0)
        return first

    def _ties(self) -> None:
        """A copy starts when the one before it has ended, an offload no sooner than its forward has."""
        for item in self.items:
            reasons = [(self.first[other, item], self._end(other)) for other in self.items if other != item]
            if item[0] is Op.O:
                reasons.append((self.goes[item[1]], self.written.end(self.s, (Op.F, item[1]))))
            ties = []
            for holds, end in reasons:
                tie = self.model.literal()
                self.model.at_most(tie - holds)
                self.model.at_most(self.start[item] - end - ~tie)
                ties.append(tie)
            self.model.at_least(total(ties) - self.goes[item[1]])

    def _late(self, c: int, item: Item) -> Linear:
        """Whether a chunk is copied and its load starts after an action does; if not, it starts before, or with it."""
        if self.goes[c].never or item == (Op.B, c):
            return NEVER
        if item == (Op.F, c):
            return self.goes[c]
        start, back = self.written.start[self.s][item], self.start[Op.L, c]
        late = self.model.literal()
        self.model.at_most(late - self.goes[c])
        self.model.at_most(late - self.written.orders.before[self.s][item, (Op.B, c)])
        self.model.at_least(back - start + (1.0 + MARGIN) * ~late, MARGIN)
        self.model.at_least(start - back + late + ~self.goes[c])
        return late

    def _done(self, c: int, item: Item) -> Linear:
        """Whether a chunk is copied and an action ends before its load starts."""
        late = self.late(c, item)
        if late.never:
            return NEVER
        done = self.model.literal()
        self.model.at_most(done - late)
        self.model.at_least(self.start[Op.L, c] - self.written.end(self.s, item) + ~done)
        return done

    def hold(self) -> None:
        """No action and no load lifts the rank above its cap."""
        s, memory = self.s, self.memory
        for op, c in self.written.orders.items[s]:
            if op is not Op.W:
                needs = memory.needs(s, c) if op is Op.B else [NEVER]
                memory.limit(s, memory.at(s, (op, c)), needs, partial(self._away_from, (op, c)))
        for op, c in self.items:
            if op is Op.L:
                self._hold_at_load(c)

    def _away_from(self, item: Item) -> Linear:
        """What is on the host when an action starts."""
        start = self.written.start[self.s][item]
        parts = []
        for c in self.written.size:
            if c == item[1] or (late := self.late(c, item)).never:
                continue
            gone = self.model.literal()
            self.model.at_most(gone - self.goes[c])
            self.model.at_most(gone - self.written.orders.before[self.s][(Op.F, c), item])
            self.model.at_least(start - self._end((Op.O, c)) + (1.0 + MARGIN) * ~gone, MARGIN)
            parts.append(self._at_most(c, gone, late))
        return total(parts)

    def _hold_at_load(self, c: int) -> None:
        """What is live when a load starts; beside it what a backward needs that is running then."""
        s, size, memory = self.s, self.written.size, self.memory
        forward = [self.late(c, (Op.F, u)) if u != c else ALWAYS for u in size]
        backward = [self.done(c, (Op.B, u)) for u in size]
        weight = [backward[u] if (Op.W, u) not in self.written.orders.items[s] else self._weight_done(c, u) for u in size]
        needs, slack = [NEVER], [~self.goes[c]]
        for u in size:
            running = self.late(c, (Op.B, u)) - backward[u]
            if running.terms:
                needs += memory.needs(s, u)
                slack += [~running] * 4
        memory.limit(s, Moment(forward, backward, weight), needs, partial(self._away_at_load, c), slack)

    def _weight_done(self, c: int, u: int) -> Linear:
        done = self.done(c, (Op.W, u)) if u != c else NEVER
        self.model.at_most(done - self.done(c, (Op.B, u)))
        return done

    def _away_at_load(self, c: int) -> Linear:
        """What is on the host when a load starts, itself not counted."""
        load: Item = (Op.L, c)
        others = [u for op, u in self.items if op is Op.L and u != c]
        return total(self._at_most(u, self.first[(Op.O, u), load], self.first[load, (Op.L, u)]) for u in others)

    def _at_most(self, c: int, *literals: Linear) -> Linear:
        """What is copied of a chunk if all literals are true, else zero."""
        away = self.model.variable(0.0, self.most[c])
        self.model.at_most(away - self.moved[c])
        for literal in literals:
            self.model.at_most(away - self.most[c] * literal)
        return away

    def order(self, values: Sequence[float]) -> tuple[Action, ...]:
        """The copies of a solution, in order."""
        made = [item for item in self.items if self.goes[item[1]].holds(values)]
        place = {b: sum(self.first[a, b].holds(values) for a in made if a != b) for b in made}
        return tuple(Action(op, self.s, c) for op, c in sorted(made, key=lambda item: place[item]))

    def shares(self, values: Sequence[float], layers: Sequence[int], bump: float) -> list[float]:
        """Of the kept bytes of every chunk, what a solution copies."""
        shares = []
        for c, goes in enumerate(self.goes):
            kept = self.tables.kept_bytes(self.s, c, layers[c])
            num_bytes = round((self.moved[c].value(values) + bump) * self.cap)
            share = min(self.tables.offloadable_share, (num_bytes + 0.5) / kept) if kept else 0.0
            shares.append(share if goes.holds(values) else 0.0)
        return shares
