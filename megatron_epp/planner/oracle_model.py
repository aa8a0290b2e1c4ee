"""The integer program of the oracle: who comes first on every rank, and how many layers recompute.

Chunks cross no boundary out of turn (`check` forbids it), so all ranks run their forwards in one order and their backwards in
one order: `ahead` and `behind` are shared, and only how the two interleave is a matter of each rank. Times are in units of the
horizon and bytes in units of the cap, so that the solver's tolerances mean the same in every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from megatron_epp.planner.evaluate import Layers
from megatron_epp.planner.milp import Model
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Chunk, Op
from megatron_epp.schedule.chunk import slice_neighbours

Term = tuple[int, float]


class OracleModel:
    """One case as an integer program.

    Variables, for stage s and chunks u, v:

    - ``ahead[u, v]``, ``behind[u, v]``: u's forward (backward) runs before v's; one binary per pair, read both ways.
    - ``passed[s, u, v]``: u's forward runs before v's backward.
    - ``layers[s, u]``, ``spared[s, u]``: recomputed layers, and those of them that make room for the chunk's own backward: all
      but one, because that one is made again before anything is given up.
    - ``relief[s, u, v]``: u's recomputed layers if u is alive in v's backward, else zero.
    - ``forward[s, u]``, ``backward[s, u]``: starts. ``makespan``: the objective.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        tables: Tables,
        caps: Sequence[int],
        horizon_us: float,
        bound_us: float,
        spare: float = 0.0,
    ) -> None:
        """Write the program.

        Args:
            horizon_us: only schedules that end by then are of interest.
            bound_us: none ends earlier.
            spare: share of each cap to keep free, against the solver's tolerance.
        """
        self.chunks, self.tables, self.caps, self.unit_us, self.spare = chunks, tables, caps, horizon_us, spare
        self.stages, self.size = range(len(tables.rank_of)), range(len(chunks))
        self.model = Model()
        self.makespan = self.model.variable(bound_us / horizon_us, 1.0, cost=1.0)
        self._times()
        self._pair_binaries()
        self._layers()
        self._chains()
        self._turns()
        self._transitivity()
        self._loads()
        for stage in self.stages:
            self._memory(stage)

    def _times(self) -> None:
        """All times in units, the earliest start of every action and the least time from its end to the end of all."""
        t, unit, last = self.tables, self.unit_us, len(self.stages) - 1
        self.f = [[time / unit for time in row] for row in t.forward_us]
        self.b = [[time / unit for time in row] for row in t.backward_us]
        self.layer = [[time / unit for time in row] for row in t.layer_us]
        self.hop = [[time / unit for time in row] for row in t.hops]
        self.f_head = [[0.0] * len(self.size) for _ in self.stages]
        self.b_tail = [[0.0] * len(self.size) for _ in self.stages]
        for s in range(1, last + 1):
            for c in self.size:
                self.f_head[s][c] = self.f_head[s - 1][c] + self.f[s - 1][c] + self.hop[s - 1][c]
                self.b_tail[s][c] = self.b_tail[s - 1][c] + self.b[s - 1][c] + self.hop[s - 1][c]
        self.b_head = [[0.0] * len(self.size) for _ in self.stages]
        self.f_tail = [[0.0] * len(self.size) for _ in self.stages]
        for c in self.size:
            turn_head, turn_tail = self.f_head[last][c] + self.f[last][c], self.b_tail[last][c] + self.b[last][c]
            for s in reversed(self.stages):
                self.b_head[s][c], self.f_tail[s][c] = turn_head, turn_tail
                if s:
                    turn_head += self.b[s][c] + self.hop[s - 1][c]
                    turn_tail += self.f[s][c] + self.hop[s - 1][c]

    def _pair_binaries(self) -> None:
        """One binary per pair; the order of slices, and of forwards of chunks that are alike in everything, is fixed."""
        before = slice_neighbours(self.chunks).previous
        root = list(self.size)
        for c in self.size:
            while (earlier := before[root[c]]) is not None:
                root[c] = earlier
        whole = [all(s.start == 0 for s in chunk.segments) and root.count(c) == 1 for c, chunk in enumerate(self.chunks)]
        place = {c: self.chunks[c].segments[0].start for c in self.size}
        self.ahead: dict[tuple[int, int], Term] = {}
        self.behind: dict[tuple[int, int], Term] = {}
        for u, v in permutations(self.size, 2):
            if u > v:
                continue
            linked = root[u] == root[v]
            first = place[u] < place[v]
            alike = whole[u] and whole[v] and self._profile(u) == self._profile(v)
            self._pair(self.ahead, u, v, first if linked else True if alike else None)
            self._pair(self.behind, u, v, not first if linked else None)
        self.passed = {
            (s, u, v): self.model.binary() if u != v else self.model.variable(1.0, 1.0)
            for s in self.stages
            for u in self.size
            for v in self.size
        }

    def _pair(self, table: dict[tuple[int, int], Term], u: int, v: int, fixed: bool | None) -> None:
        variable = self.model.binary() if fixed is None else self.model.variable(float(fixed), float(fixed))
        table[u, v] = variable, 1.0
        table[v, u] = variable, -1.0

    def _profile(self, c: int) -> tuple[float, ...]:
        t = self.tables
        times = [row[c] for row in (*t.forward_us, *t.backward_us, *t.layer_us, *t.hops)]
        sizes = [row[c] for row in (*t.activation, *t.saved, *t.forward_alloc)]
        more = [row[c] for row in (*t.backward_first, *t.backward_last, *t.backward_net)]
        return *times, *sizes, *more

    def _layers(self) -> None:
        add = self.model.variable
        cells = [(s, c) for s in self.stages for c in self.size]
        most = self.tables.num_layers
        self.layers = {(s, c): add(0.0, most[s], integer=True) for s, c in cells}
        self.spared = {(s, c): add(0.0, max(0, most[s] - 1)) for s, c in cells}
        self.forward = {(s, c): add(self.f_head[s][c], 1.0 - self.f_tail[s][c] - self.f[s][c]) for s, c in cells}
        self.backward = {(s, c): add(self.b_head[s][c], 1.0 - self.b_tail[s][c] - self.b[s][c]) for s, c in cells}
        for s, c in cells:
            self.model.row([(self.spared[s, c], 1.0), (self.layers[s, c], -1.0)], upper=0.0)

    def _chains(self) -> None:
        """Every chunk goes forward through the stages and back."""
        row = self.model.row
        for s in self.stages:
            for c in self.size:
                f, b, layer = self.forward[s, c], self.backward[s, c], (self.layers[s, c], -self.layer[s][c])
                row([(b, 1.0), (f, -1.0)], lower=self.f[s][c])
                row([(self.makespan, 1.0), (b, -1.0), layer], lower=self.b[s][c] + self.b_tail[s][c])
                if s:
                    row([(f, 1.0), (self.forward[s - 1, c], -1.0)], lower=self.f[s - 1][c] + self.hop[s - 1][c])
                    row([(self.backward[s - 1, c], 1.0), (b, -1.0), layer], lower=self.b[s][c] + self.hop[s - 1][c])

    def _turns(self) -> None:
        """One action at a time on every rank."""
        for s in self.stages:
            for u, v in permutations(self.size, 2):
                f_u, f_v, b_u, b_v = self.forward[s, u], self.forward[s, v], self.backward[s, u], self.backward[s, v]
                f_us, layer = self.f[s][u], (self.layers[s, v], -self.layer[s][v])
                slack = 1.0 - self.f_tail[s][u] - self.f_head[s][v]
                self._after([(f_v, 1.0), (f_u, -1.0)], f_us, self.ahead[u, v], slack)
                slack = 1.0 - self.b_tail[s][v] - self.b_head[s][u]
                self._after([(b_u, 1.0), (b_v, -1.0), layer], self.b[s][v], self.behind[v, u], slack)
                passed = self.passed[s, u, v]
                slack = 1.0 - self.f_tail[s][u] - self.b_head[s][v]
                self._after([(b_v, 1.0), (f_u, -1.0)], f_us, (passed, 1.0), slack)
                slack = 1.0 - self.b_tail[s][v] - self.f_head[s][u]
                self._after([(f_u, 1.0), (b_v, -1.0), layer], self.b[s][v], (passed, -1.0), slack)

    def _after(self, terms: list[Term], least: float, turn: Term, slack: float) -> None:
        """``sum(terms) >= least`` when the turn's literal is true; else ``>= least - slack``, which always holds."""
        variable, sign = turn
        if slack <= 0.0:
            return
        # literal = variable, or 1 - variable where the sign is negative
        self.model.row([*terms, (variable, -sign * slack)], lower=least - (slack if sign > 0 else 0.0))

    def _literal(self, turn: Term, factor: float) -> tuple[Term, float]:
        """A factor times a literal, as a term and a constant."""
        variable, sign = turn
        return (variable, sign * factor), 0.0 if sign > 0 else factor

    def _transitivity(self) -> None:
        row = self.model.row
        for u, v, w in permutations(self.size, 3):
            if u < min(v, w):
                for table in (self.ahead, self.behind):
                    self._at_most(2.0, [table[u, v], table[v, w], table[w, u]])
        for s in self.stages:
            for u, v in permutations(self.size, 2):
                # u before v's forward, which is before v's backward; u's forward before its backward, which is before v's.
                passed = (self.passed[s, u, v], -1.0)
                self._at_most(1.0, [self.ahead[u, v], passed])
                self._at_most(1.0, [self.behind[u, v], passed])
                if s:  # what has come as far as this stage passed the one before even earlier
                    row([(self.passed[s - 1, u, v], 1.0), (self.passed[s, u, v], -1.0)], lower=0.0)
            for u, v, w in permutations(self.size, 3):
                self._at_most(2.0, [self.ahead[u, v], (self.passed[s, v, w], 1.0), (self.passed[s, u, w], -1.0)])
                self._at_most(2.0, [(self.passed[s, u, v], 1.0), self.behind[v, w], (self.passed[s, u, w], -1.0)])

    def _at_most(self, limit: float, literals: Sequence[Term]) -> None:
        parts = [self._literal(literal, 1.0) for literal in literals]
        self.model.row([term for term, _ in parts], upper=limit - sum(constant for _, constant in parts))

    def _loads(self) -> None:
        """Cuts: before an action starts its rank has run all that comes before it, and after it all that comes after."""
        for s in self.stages:
            head, tail = min(self.f_head[s]), min(self.b_tail[s])
            f, b = self.f[s], self.b[s]
            recompute = [(self.layers[s, c], -self.layer[s][c]) for c in self.size]
            self.model.row([(self.makespan, 1.0), *recompute], lower=head + tail + sum(f) + sum(b))
            for c in self.size:
                others = [u for u in self.size if u != c]
                passed = {u: ((self.passed[s, u, c], 1.0), (self.passed[s, c, u], 1.0)) for u in others}
                before_b = [(self.behind[u, c], b[u]) for u in others] + [(passed[u][0], f[u]) for u in others]
                after_b = [(self.behind[c, u], b[u]) for u in others] + [(self._not(passed[u][0]), f[u]) for u in others]
                before_f = [(self.ahead[u, c], f[u]) for u in others] + [(self._not(passed[u][1]), b[u]) for u in others]
                after_f = [(self.ahead[c, u], f[u]) for u in others] + [(passed[u][1], b[u]) for u in others]
                mine = (self.layers[s, c], -self.layer[s][c])
                start_f, start_b = self.forward[s, c], self.backward[s, c]
                self._load([(start_b, 1.0)], before_b, head + f[c])
                self._load([(self.makespan, 1.0), (start_b, -1.0), mine], after_b, tail + b[c])
                self._load([(start_f, 1.0)], before_f, head)
                self._load([(self.makespan, 1.0), (start_f, -1.0), mine], after_f, tail + f[c] + b[c])

    @staticmethod
    def _not(literal: Term) -> Term:
        return literal[0], -literal[1]

    def _load(self, terms: list[Term], work: Sequence[tuple[Term, float]], least: float) -> None:
        """``sum(terms) >= least + sum(time * literal)``."""
        parts = [self._literal(literal, -time) for literal, time in work]
        self.model.row([*terms, *(term for term, _ in parts)], lower=least - sum(constant for _, constant in parts))

    def _memory(self, s: int) -> None:
        """At every backward of a stage, live bytes are within the cap. Between backwards they only rise."""
        t, cap = self.tables, self.caps[s]
        kept, saved, opened, net = t.activation[s], t.saved[s], t.forward_alloc[s], t.backward_net[s]
        for v in self.size:
            first, last = kept[v] + t.backward_first[s][v], max(t.backward_last[s][v], net[v])
            at_most = (
                t.static[s] + sum(opened) + max(kept[v], first, last) + sum(max(kept[u], net[u]) for u in self.size if u != v)
            )
            if at_most <= cap:
                continue
            terms: list[Term] = []
            live = t.static[s] + opened[v]
            for u in self.size:
                if u == v:
                    continue
                terms.append((self.passed[s, u, v], (kept[u] + opened[u]) / cap))
                term, constant = self._literal(self.behind[u, v], (net[u] - kept[u]) / cap)
                terms += [term, (self._relief(s, u, v), -saved[u] / cap)]
                live += round(constant * cap)
            room = 1.0 - self.spare - live / cap
            self.model.row([*terms, (self.layers[s, v], -saved[v] / cap)], upper=room - kept[v] / cap)
            self.model.row([*terms, (self.spared[s, v], -saved[v] / cap)], upper=room - first / cap)
            self.model.row(terms, upper=room - last / cap)

    def _relief(self, s: int, u: int, v: int) -> int:
        most = float(self.tables.num_layers[s])
        relief = self.model.variable(0.0, most)
        self.model.row([(relief, 1.0), (self.layers[s, u], -1.0)], upper=0.0)
        gone, constant = self._literal(self.behind[u, v], most)
        self.model.row([(relief, 1.0), (self.passed[s, u, v], -most), gone], upper=-constant)
        return relief

    def order(self, values: Sequence[float]) -> Order:
        """The order of a solution."""

        def ranked(table: dict[tuple[int, int], Term]) -> list[int]:
            def holds(u: int, v: int) -> bool:
                variable, sign = table[u, v]
                return (values[variable] > 0.5) == (sign > 0)

            return sorted(self.size, key=lambda c: sum(holds(u, c) for u in self.size if u != c))

        forwards, backwards = ranked(self.ahead), ranked(self.behind)
        ranks = []
        for s in self.stages:
            actions: list[Action] = []
            run = 0
            for c in backwards:
                upto = max(run, sum(values[self.passed[s, u, c]] > 0.5 for u in self.size))
                actions += (Action(Op.F, s, u) for u in forwards[run:upto])
                run = upto
                actions.append(Action(Op.B, s, c))
            ranks.append(tuple(actions))
        return tuple(ranks)

    def recompute(self, values: Sequence[float]) -> Layers:
        """The recomputed layers of a solution, ``[stage][chunk]``."""
        return [[round(values[self.layers[s, c]]) for c in self.size] for s in self.stages]
