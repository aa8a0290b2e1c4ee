"""Live bytes in the oracle's program: the account that the steps of a plan carry, as rows.

When an action starts, the live bytes depend on the actions that have run and on the layers they recompute; at the start of a
backward its own needs are added. All of that is exact: a product of a literal and a number of layers is a variable of its own,
and so is the fact that a chunk recomputes all its layers. Nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_epp.plan import Op
from megatron_epp.planner.exact.milp import ALWAYS, NEVER, Linear, Model, total
from megatron_epp.planner.exact.orders import Item, Orders
from megatron_epp.planner.tables import Tables, Times

SIZES = ("activation", "saved", "forward_alloc", "backward_residual", "weight_bytes")
"""Columns of `Tables` that the account is made of."""


class Memory:
    """The account of every rank. Sizes are shares of its cap.

    Attributes:
        sizes: the tables' sizes in that unit, by name and stage.
    """

    def __init__(
        self,
        model: Model,
        tables: Tables,
        caps: Sequence[int],
        orders: Orders,
        recompute_steps: list[list[Linear]],
        spare: float,
    ) -> None:
        self.model, self.tables, self.orders, self.recompute_steps = model, tables, orders, recompute_steps
        self.room = 1.0 - spare
        self.static = [size / cap for size, cap in zip(tables.static, caps, strict=True)]
        self.sizes: dict[str, Times] = {
            name: [[size / cap for size in row] for row, cap in zip(getattr(tables, name), caps, strict=True)] for name in SIZES
        }
        self.size = orders.size
        self.ends = {
            split: [[[size / cap for size in tables.at_ends(s, c, split)] for c in orders.size] for s, cap in enumerate(caps)]
            for split in (False, True)
        }
        self._recomputed: dict[tuple[int, int, Item], Linear] = {}

    def recomputed(self, s: int, c: int, item: Item) -> Linear:
        """Return the recomputed layers of a chunk if its backward runs before an item, else zero.

        Args:
            s: the stage.
            c: the chunk.
            item: an action of the stage.
        """
        if (s, c, item) not in self._recomputed:
            done, steps, most = self.orders.before[s][(Op.B, c), item], self.recompute_steps[s][c], self.tables.num_layers[s]
            if done.never or done.always:
                made = steps * done.constant
            else:
                made = self.model.variable(0.0, most)
                self.model.at_most(made - steps)
                self.model.at_most(made - most * done)
                self.model.at_least(made - steps + most * ~done)
            self._recomputed[s, c, item] = made
        return self._recomputed[s, c, item]

    def hold(self) -> None:
        """Add rows by which no action lifts its rank above the cap.

        Between backwards bytes only rise, so where all backwards are whole the forwards need no rows.
        """
        for s, items in enumerate(self.orders.items):
            split = any(op is Op.W for op, _ in items)
            for op, c in items:
                if op is Op.B:
                    self._limit(s, (op, c), self._needs(s, c))
                elif op is Op.F and split:
                    self._limit(s, (op, c), [NEVER])

    def _limit(self, s: int, item: Item, needs: Iterable[Linear]) -> None:
        """Add rows by which the live bytes when an action starts, together with each need on its own, fit the cap.

        Args:
            s: the stage.
            item: the action; if it is a forward, what it keeps is live already.
            needs: bytes above the live ones, as shares of the cap; not needed at the same time.
        """
        begun, ended = self._ran(s, Op.F, item), self._ran(s, Op.B, item)
        live = total(self._plain(s, item, begun, ended))
        tight = [need for need in needs if self.model.highest(live + need) > self.room]
        if not tight:
            return
        live = live - total(self._relief(s, begun, ended))
        for need in tight:
            self.model.at_most(live + need, self.room)

    def _ran(self, s: int, op: Op, item: Item) -> list[Linear]:
        """Return a literal per chunk that its forward has started, or its backward has ended, when an item starts.

        Args:
            s: the stage.
            op: F for started forwards, B for ended backwards.
            item: the operation and chunk that starts.
        """
        before, own = self.orders.before[s], ALWAYS if op is Op.F else NEVER
        return [own if (op, c) == item else before[(op, c), item] for c in self.size]

    def _plain(self, s: int, item: Item, begun: Sequence[Linear], ended: Sequence[Linear]) -> Iterator[Linear]:
        """Yield the live bytes when an item starts, without any recompute, as shares of the cap.

        Args:
            s: the stage.
            item: the operation and chunk that starts.
            begun, ended: of each chunk, a literal that its forward has started, and that its backward has ended (`_ran`).
        """
        kept, opened, residual, stays = (
            self.sizes[name][s] for name in ("activation", "forward_alloc", "backward_residual", "weight_bytes")
        )
        yield Linear(self.static[s])
        for c in self.size:
            yield (kept[c] + opened[c]) * begun[c]
            yield (residual[c] - kept[c]) * ended[c]
            if c != item[1] and not self.orders.split[s][c].never:
                yield stays[c] * (ended[c] - self.orders.before[s][(Op.W, c), item])

    def _relief(self, s: int, begun: Sequence[Linear], ended: Sequence[Linear]) -> Iterator[Linear]:
        """Yield the bytes that recompute saves on each chunk that is alive, as shares of the cap.

        Args:
            s: the stage.
            begun, ended: as for `_plain`.
        """
        most = float(self.tables.num_layers[s])
        for c in self.size:
            recompute_steps, saved = self.recompute_steps[s][c], self.sizes["saved"][s][c]
            if begun[c].never or ended[c].always or not saved:
                continue
            if begun[c].always and ended[c].never:
                yield saved * recompute_steps
                continue
            relief = self.model.variable(0.0, most)
            self.model.at_most(relief - recompute_steps)
            self.model.at_most(relief - most * (begun[c] - ended[c]))
            yield saved * relief

    def _needs(self, s: int, c: int) -> Iterator[Linear]:
        """Yield the bytes that a backward may need above those live at its start; the most counts
        (`kernels.memory.backward_peak`).
        """
        size = {name: rows[s][c] for name, rows in self.sizes.items()}
        split = self.orders.split[s][c]
        kept = size["activation"] - size["saved"] * self.recompute_steps[s][c]
        most, made = self.tables.num_layers[s], NEVER
        if most and size["saved"] > 0.0:
            everything = self.recompute_steps[s][c]
            if most > 1:
                everything = self.model.variable(0.0, 1.0)
                self.model.at_most(self.recompute_steps[s][c] - everything, most - 1)
            made = size["saved"] * everything
        (first, last), (first_split, last_split) = (self.ends[split][s][c] for split in (False, True))
        yield NEVER
        yield made + first + (first_split - first) * split
        yield last + (last_split - last) * split - kept
        yield size["weight_bytes"] * split - kept + size["backward_residual"]
