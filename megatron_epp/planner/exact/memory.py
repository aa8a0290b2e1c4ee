"""Live bytes in the oracle's program: the account that the steps of a plan carry, as rows.

A moment is the start of an action. The live bytes then depend on the actions that have run and on the layers they
recompute; at the start of a backward its own needs are added. All of that is exact: a product of a literal and a number of
layers is a variable of its own, and so is the fact that a chunk recomputes all its layers. Nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.plan import Op
from megatron_epp.planner.exact.milp import ALWAYS, NEVER, Linear, Model, total
from megatron_epp.planner.exact.orders import Item, Orders
from megatron_epp.planner.tables import Tables, Times

Literals = Sequence[Linear]

SIZES = (
    "activation",
    "saved",
    "forward_alloc",
    "backward_residual",
    "weight_bytes",
)
"""Columns of `Tables` that the account is made of."""


@dataclass(frozen=True, slots=True)
class Moment:
    """State of a rank at one moment, as literals by chunk.

    Attributes:
        forward: the forward has started.
        backward: the backward has ended.
        weight: the weight gradient has ended, where it is an action of its own; else the same as `backward`.
    """

    forward: Literals
    backward: Literals
    weight: Literals


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
        done = self.orders.before[s][(Op.B, c), item]
        if (s, c, item) not in self._recomputed:
            self._recomputed[s, c, item] = self.product(self.recompute_steps[s][c], done, self.tables.num_layers[s])
        return self._recomputed[s, c, item]

    def product(self, number: Linear, literal: Linear, most: float) -> Linear:
        """Return a number times a literal.

        Args:
            number: between 0 and `most`.
            literal: 0 or 1.
            most: upper bound of the number.
        """
        if literal.never or literal.always:
            return number * literal.constant
        made = self.model.variable(0.0, most)
        self.model.at_most(made - number)
        self.model.at_most(made - most * literal)
        self.model.at_least(made - number + most * ~literal)
        return made

    def hold(self) -> None:
        """No action lifts its rank above the cap.

        Between backwards bytes only rise, so where all backwards are whole the forwards need no rows.
        """
        for s, items in enumerate(self.orders.items):
            split = any(op is Op.W for op, _ in items)
            for op, c in items:
                if op is Op.B:
                    self.limit(s, self.at(s, (op, c)), self.needs(s, c))
                elif op is Op.F and split:
                    self.limit(s, self.at(s, (op, c)), [NEVER])

    def at(self, s: int, item: Item) -> Moment:
        """The moment at which an action starts; if it is a forward, what it keeps is live already."""
        before, own = self.orders.before[s], item[1]

        def ran(op: Op, c: int) -> Linear:
            if (op, c) == item:
                return ALWAYS if op is Op.F else NEVER
            return before[(op, c), item]

        backward = [ran(Op.B, c) for c in self.size]
        weight = [backward[c] if self.orders.split[s][c].never or c == own else ran(Op.W, c) for c in self.size]
        return Moment([ran(Op.F, c) for c in self.size], backward, weight)

    def limit(self, s: int, moment: Moment, needs: Iterable[Linear]) -> None:
        """Add rows by which the live bytes at a moment, together with each need on its own, fit the cap.

        Args:
            s: the stage.
            moment: the state of its rank.
            needs: bytes above the live ones, as shares of the cap; not needed at the same time.
        """
        live = self._plain(s, moment)
        tight = [need for need in needs if self.model.highest(live + need) > self.room]
        if not tight:
            return
        live = live - total(self._relief(s, moment))
        for need in tight:
            self.model.at_most(live + need, self.room)

    def _plain(self, s: int, moment: Moment) -> Linear:
        """Live bytes at a moment without any recompute, as a share of the cap."""
        kept, opened, residual, stays = (
            self.sizes[name][s] for name in ("activation", "forward_alloc", "backward_residual", "weight_bytes")
        )
        parts = [Linear(self.static[s])]
        for c in self.size:
            parts.append((kept[c] + opened[c]) * moment.forward[c])
            parts.append((residual[c] - kept[c]) * moment.backward[c])
            if moment.weight[c] is not moment.backward[c]:
                parts.append(stays[c] * (moment.backward[c] - moment.weight[c]))
        return total(parts)

    def _relief(self, s: int, moment: Moment) -> Iterator[Linear]:
        """Yield the bytes that recompute saves on each chunk that is alive, as shares of the cap."""
        most = float(self.tables.num_layers[s])
        for c in self.size:
            begun, ended, recompute_steps = moment.forward[c], moment.backward[c], self.recompute_steps[s][c]
            saved = self.sizes["saved"][s][c]
            if begun.never or ended.always or not saved:
                continue
            if begun.always and ended.never:
                yield saved * recompute_steps
                continue
            relief = self.model.variable(0.0, most)
            self.model.at_most(relief - recompute_steps)
            self.model.at_most(relief - most * (begun - ended))
            yield saved * relief

    def kept(self, s: int, c: int) -> Linear:
        """Bytes that a chunk keeps from forward to backward, as a share of the cap."""
        return self.sizes["activation"][s][c] - self.sizes["saved"][s][c] * self.recompute_steps[s][c]

    def needs(self, s: int, c: int) -> Iterator[Linear]:
        """Yield the bytes that a backward may need above those live at its start; the most counts
        (`kernels.memory.backward_peak`).
        """
        size = {name: rows[s][c] for name, rows in self.sizes.items()}
        split = self.orders.split[s][c]
        stays = size["weight_bytes"] * split
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
        yield last + (last_split - last) * split - self.kept(s, c)
        yield stays - self.kept(s, c) + size["backward_residual"]
