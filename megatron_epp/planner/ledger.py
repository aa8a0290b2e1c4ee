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
        activation, saved, layer_us, workspace, forward_alloc, forward_free, backward_alloc, backward_free: as in `Tables`.
    """

    number: dict[int, int]
    most: list[int]
    static: int
    activation: list[int]
    saved: list[int]
    layer_us: list[float]
    workspace: list[int]
    forward_alloc: list[int]
    forward_free: list[int]
    backward_alloc: list[int]
    backward_free: list[int]

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
            workspace=flat(tables.workspace),
            forward_alloc=flat(tables.forward_alloc),
            forward_free=flat(tables.forward_free),
            backward_alloc=flat(tables.backward_alloc),
            backward_free=flat(tables.backward_free),
        )


def levels(actions: tuple[Action, ...], ledger: Ledger, layers: list[int]) -> tuple[list[int], list[int]]:
    """What every action of a rank takes when it starts and gives back when it ends, bytes."""
    takes, gives = [], []
    for op, stage, c in actions:
        item = ledger.number[stage] + c
        kept = ledger.activation[item] - layers[item] * ledger.saved[item]
        if op is Op.F:
            takes.append(kept + ledger.forward_alloc[item])
            gives.append(ledger.forward_free[item])
        else:
            workspace = ledger.workspace[item] if layers[item] else 0
            takes.append(ledger.backward_alloc[item] + workspace)
            gives.append(kept + ledger.backward_free[item] + workspace)
    return takes, gives
