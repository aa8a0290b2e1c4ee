"""Integer program of the oracle: order, recompute and split weight gradients of a small chunk table.

Times are in units of the horizon and bytes in units of the cap, so that the solver's tolerances mean the same in every case.
The parts: precedence (`Orders`), start times (here) and live bytes (`Memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from megatron_epp.plan import Chunk, Op
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.exact.memory import Memory
from megatron_epp.planner.exact.milp import NEVER, Linear, Model, total
from megatron_epp.planner.exact.orders import Item, Orders, Windows
from megatron_epp.planner.tables import Tables


class OracleModel:
    """One case as an integer program.

    Attributes:
        orders: the literals of precedence.
        recompute_steps: recomputed layers ``[stage][chunk]``.
        start, took: of every action, by stage and item.
        makespan: the objective.
        memory: live bytes.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        tables: Tables,
        caps: Sequence[int],
        horizon_us: float,
        bound_us: float,
        *,
        split_weight: bool = False,
        spare: float = 0.0,
    ) -> None:
        """Write the program.

        Args:
            chunks: the chunk table.
            tables: its times and sizes.
            caps: bytes of the ranks.
            horizon_us: only schedules that end by then are of interest.
            bound_us: none ends earlier.
            split_weight: weight gradients may be actions of their own.
            spare: share of each cap to keep free, against the solver's tolerance.
        """
        self.tables, self.stages, self.size = tables, range(len(tables.rank_of)), range(len(chunks))
        self.model = Model()
        self.windows = Windows.of(chunks, tables, horizon_us, split_weight)
        self.makespan = self.model.variable(bound_us / horizon_us, float("inf"), cost=1.0)
        self.orders = Orders(self.model, chunks, tables, self.windows)
        self._actions()
        self._chains()
        self._turns()
        self._ends()
        self.memory = Memory(self.model, tables, caps, self.orders, self.recompute_steps, spare)
        self._loads()
        self.memory.hold()

    def _actions(self) -> None:
        """Starts and durations. A whole backward takes what its weight gradient would take on its own."""
        w, variable = self.windows, self.model.variable
        most = self.tables.num_layers
        self.recompute_steps = [[variable(0.0, most[s], integer=True) for _ in self.size] for s in self.stages]
        self.start: list[dict[Item, Linear]] = []
        self.took: list[dict[Item, Linear]] = []
        for s in self.stages:
            start: dict[Item, Linear] = {}
            took: dict[Item, Linear] = {}
            for op, c in self.orders.items[s]:
                split_off = w.weight[s][c] * self.orders.split[s][c]
                if op is Op.F:
                    took[op, c] = Linear(w.least[s][op, c])
                elif op is Op.B:
                    took[op, c] = w.least[s][op, c] + w.layer[s][c] * self.recompute_steps[s][c] + w.weight[s][c] - split_off
                else:
                    took[op, c] = split_off
                start[op, c] = variable(w.head[s][op, c], 1.0 - w.tail[s][op, c] - w.least[s][op, c])
            self.start.append(start)
            self.took.append(took)

    def end(self, s: int, item: Item) -> Linear:
        return self.start[s][item] + self.took[s][item]

    def _chains(self) -> None:
        """Every chunk goes forward through the stages and back."""
        at_least, hop = self.model.at_least, self.windows.hop
        for s in self.stages:
            for c in self.size:
                at_least(self.start[s][Op.B, c] - self.end(s, (Op.F, c)))
                if s:
                    at_least(self.start[s][Op.F, c] - self.end(s - 1, (Op.F, c)), hop[s - 1][c])
                    at_least(self.start[s - 1][Op.B, c] - self.end(s, (Op.B, c)), hop[s - 1][c])

    def _turns(self) -> None:
        """One action at a time on every rank."""
        for s in self.stages:
            for a, b in permutations(self.orders.items[s], 2):
                turn = self.orders.before[s][a, b]
                if not turn.never:
                    slack = 1.0 - self.windows.tail[s][a] - self.windows.head[s][b]
                    self.model.at_least(self.start[s][b] - self.end(s, a) + max(0.0, slack) * ~turn)

    def _ends(self) -> None:
        for s in self.stages:
            for item in self.orders.items[s]:
                if item[0] is not Op.F:
                    tail = self.windows.tail[s][item]
                    self.model.at_least(self.makespan - self.end(s, item), tail)
                    self.model.at_most(self.end(s, item), 1.0 - tail)

    def _loads(self) -> None:
        """Cuts: before an action starts its rank has run all that comes before it, and after it all that comes after.

        The first action of a rank is the forward that is first on all; the last, split weight gradients excluded, the
        backward that is last on all.
        """
        w, at_least = self.windows, self.model.at_least
        first, last = self._extremes(Op.F), self._extremes(Op.B)
        for s in self.stages:
            head = total(w.head[s][Op.F, c] * first[c] for c in self.size)
            tail = total(w.tail[s][Op.B, c] * last[c] for c in self.size)
            core = [item for item in self.orders.items[s] if item[0] is not Op.W]
            weights = [took for item, took in self.took[s].items() if item[0] is Op.W]
            work = total(self.took[s][item] for item in core)
            at_least(self.makespan - work - head - tail)
            at_least(self.makespan - work - total(weights) - head)
            for item in core:
                start = self.start[s][item]
                earlier, later = self._loads_around(s, item, core)
                at_least(start - earlier - head)
                at_least(self.makespan - start - self.took[s][item] - later - tail)
                if weights:
                    self._loads_with_weights(s, item, earlier, later, head)

    def _loads_around(self, s: int, item: Item, core: Sequence[Item]) -> tuple[Linear, Linear]:
        """Least time of the forwards and backwards before an item and after it.

        Args:
            s: the stage.
            item: the operation and chunk.
            core: all forwards and backwards of the stage.
        """
        w, before = self.windows, self.orders.before[s]
        earlier: list[Linear] = []
        later: list[Linear] = []
        for op, c in core:
            if (op, c) == item:
                continue
            earlier.append(w.least[s][op, c] * before[(op, c), item])
            later.append(w.least[s][op, c] * before[item, (op, c)])
            if op is Op.B and item[0] is Op.B:
                done = self.memory.recomputed(s, c, item)
                earlier.append(w.layer[s][c] * done)
                later.append(w.layer[s][c] * (self.recompute_steps[s][c] - done))
        return total(earlier), total(later)

    def _loads_with_weights(self, s: int, item: Item, earlier: Linear, later: Linear, head: Linear) -> None:
        """Constrain the loads with weight gradients, whether these are actions of their own or part of their backwards.

        Args:
            s: the stage.
            item: the operation and chunk.
            earlier, later: time of the forwards and backwards before the item and after it, as a share of the horizon.
            head: time before the stage can start, likewise.
        """
        before, weight = self.orders.before[s], self.windows.weight[s]
        own = [c for op, c in self.orders.items[s] if op is Op.W and c != item[1]]
        ahead = total(weight[c] * before[(Op.W, c), item] for c in own)
        behind = total(weight[c] * before[item, (Op.W, c)] for c in own)
        mine = weight[item[1]] * (self.orders.split[s][item[1]] if item[0] is Op.B else Linear(1.0))
        self.model.at_least(self.start[s][item] - earlier - ahead - head)
        self.model.at_least(self.makespan - self.end(s, item) - later - behind - mine)

    def _extremes(self, op: Op) -> list[Linear]:
        """Create an indicator per chunk that its forward is first of all, or its backward last of all; they sum to one."""
        before, model = self.orders.before[0], self.model
        found: list[Linear] = []
        for c in self.size:
            ways = [before[(op, c), (op, u)] if op is Op.F else before[(op, u), (op, c)] for u in self.size if u != c]
            if any(way.never for way in ways):
                found.append(NEVER)
                continue
            found.append(model.variable(0.0, 1.0))
            for way in ways:
                model.at_most(found[-1] - way)
        model.at_least(total(found), 1.0)
        model.at_most(total(found), 1.0)
        return found

    def recompute(self, values: Sequence[float]) -> RecomputeSteps:
        """The recomputed layers of a solution, ``[stage][chunk]``."""
        return [[round(count.value(values)) for count in row] for row in self.recompute_steps]
