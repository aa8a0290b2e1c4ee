"""The memory of one rank, by stage and chunk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Op


@dataclass(frozen=True, slots=True)
class Ledger:
    """The tables of one rank. An item is a stage and a chunk, numbered stage by stage; columns are by item.

    Attributes:
        number: item of chunk 0 of each stage.
        most: layers of the item's stage.
        static: bytes held throughout.
        activation, saved, layer_us, forward_alloc, forward_free: as in `Tables`.
        first, last, net: `Tables.backward_first`, `Tables.backward_last` and `Tables.backward_net`.
    """

    number: dict[int, int]
    most: list[int]
    static: int
    activation: list[int]
    saved: list[int]
    layer_us: list[float]
    forward_alloc: list[int]
    forward_free: list[int]
    first: list[int]
    last: list[int]
    net: list[int]

    @staticmethod
    def of(tables: Tables, rank: int) -> Ledger:
        stages, chunks = tables.stages_of[rank], len(tables.message_us)
        none: list[float] = [0.0] * chunks

        def flat[T](rows: list[list[T]]) -> list[T]:
            return rows[stages[0]] if len(stages) == 1 else [entry for stage in stages for entry in rows[stage]]

        return Ledger(
            number={stage: at * chunks for at, stage in enumerate(stages)},
            most=[tables.num_layers[stage] for stage in stages for _ in range(chunks)],
            static=tables.static[rank],
            activation=flat(tables.activation),
            saved=flat(tables.saved),
            layer_us=flat(tables.layer_us or [none] * len(tables.rank_of)),
            forward_alloc=flat(tables.forward_alloc),
            forward_free=flat(tables.forward_free),
            first=flat(tables.backward_first),
            last=flat(tables.backward_last),
            net=flat(tables.backward_net),
        )

    def kept(self, item: int, layers: int) -> int:
        """Activations from forward to backward when so many layers recompute."""
        return self.activation[item] - layers * self.saved[item]

    def own(self, item: int, layers: int) -> int:
        """The most that a backward and its chunk's activations hold together: `Tables.rise_bytes` above `kept`.

        It never grows with the layers that recompute.
        """
        made = self.saved[item] if 0 < layers == self.most[item] else 0
        return max(self.kept(item, layers) + max(0, self.first[item] + made), self.last[item], self.net[item])


def levels(actions: tuple[Action, ...], ledger: Ledger, layers: list[int]) -> tuple[list[int], list[int]]:
    """What every action of a rank takes when it starts and gives back when it ends, bytes."""
    takes, gives = [], []
    for op, stage, c in actions:
        item = ledger.number[stage] + c
        kept = ledger.kept(item, layers[item])
        if op is Op.F:
            takes.append(kept + ledger.forward_alloc[item])
            gives.append(ledger.forward_free[item])
        else:
            own = ledger.own(item, layers[item])
            takes.append(own - kept)
            gives.append(own - ledger.net[item])
    return takes, gives
