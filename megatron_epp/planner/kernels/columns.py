"""Tables and orders as flat columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.planner.kernels.compiled import Floats, Integers, floats, integers

if TYPE_CHECKING:
    from megatron_epp.planner.tables import Tables

FORWARD, BACKWARD, WEIGHT = range(3)
OPS = {Op.F: FORWARD, Op.B: BACKWARD, Op.W: WEIGHT}
"""The last digit of a code, base three."""


class Columns(NamedTuple):
    """The tables, by item: a stage and a chunk, numbered stage by stage. Names as in `Tables`.

    Attributes:
        num_rungs: of the longest ladder of recompute. The columns `layer_us`, `saved` and `price` have a place for each rung of
            each item, item by item.
        price: time of recompute per byte it saves; infinite where it saves none.
        dear_us: of the dearest step.
        layers: of the item's stage.
        most: steps on the item's ladder.
    """

    num_stages: int
    num_chunks: int
    num_rungs: int
    rank_of: Integers
    static: Integers
    forward_us: Floats
    backward_us: Floats
    layer_us: Floats
    weight_us: Floats
    hops: Floats
    price: Floats
    dear_us: Floats
    layers: Integers
    most: Integers
    activation: Integers
    saved: Integers
    fuller: Integers
    forward_alloc: Integers
    forward_free: Integers
    head: Integers
    passed: Integers
    surge: Integers
    throughout: Integers
    net: Integers
    weight_bytes: Integers
    weight_layer: Integers
    weight_surge: Integers


def columns_of(tables: Tables) -> Columns:
    chunks = len(tables.message_us)
    none: list[list[float]] = [[0.0] * chunks] * len(tables.rank_of)

    def column(rows: Sequence[Sequence[float]]) -> Floats:
        return floats(chain.from_iterable(rows or none))

    def sizes(rows: Sequence[Sequence[int]]) -> Integers:
        return integers(chain.from_iterable(rows))

    def by_rung[T](rows: Sequence[Sequence[Sequence[T]]]) -> list[T]:
        return [value for rung in zip(*map(chain.from_iterable, rows), strict=True) for value in rung]

    layer_us = by_rung([rung.layer_us for rung in tables.rungs])
    saved = by_rung([rung.saved for rung in tables.rungs])
    heights = [
        sum(level >= 0 for level in rungs) for rungs in zip(*(chain.from_iterable(r.level) for r in tables.rungs), strict=True)
    ]
    layers = [count for count in tables.num_layers for _ in range(chunks)]
    rungs = len(tables.rungs)
    return Columns(
        num_stages=len(tables.rank_of),
        num_chunks=chunks,
        num_rungs=rungs,
        rank_of=integers(tables.rank_of),
        static=integers(tables.static),
        forward_us=column(tables.forward_us),
        backward_us=column(tables.backward_us),
        layer_us=floats(layer_us),
        weight_us=column(tables.weight_us),
        hops=column([*tables.hops, [0.0] * chunks]),
        price=floats(time / size if size else float("inf") for time, size in zip(layer_us, saved, strict=True)),
        dear_us=floats(max(layer_us[at : at + rungs]) for at in range(0, len(layer_us), rungs)),
        layers=integers(layers),
        most=integers(count * height for count, height in zip(layers, heights, strict=True)),
        activation=sizes(tables.activation),
        saved=integers(saved),
        fuller=integers(by_rung([rung.fuller for rung in tables.rungs])),
        forward_alloc=sizes(tables.forward_alloc),
        forward_free=sizes(tables.forward_free),
        head=sizes(tables.backward_head),
        passed=sizes(tables.backward_passed),
        surge=sizes(tables.backward_surge),
        throughout=sizes(tables.backward_throughout),
        net=sizes(tables.backward_net),
        weight_bytes=sizes(tables.weight_bytes),
        weight_layer=sizes(tables.weight_layer),
        weight_surge=sizes(tables.weight_surge),
    )


class Codes(NamedTuple):
    """An order. An action is the number ``3 * (stage * num_chunks + chunk) + op``.

    Attributes:
        actions: of rank 0, then of rank 1, and so on.
        starts: where each rank's actions start, and the end.
    """

    actions: Integers
    starts: Integers

    @property
    def num_ranks(self) -> int:
        return len(self.starts) - 1


def code_of(action: Action, num_chunks: int) -> int:
    op, stage, c = action
    return 3 * (stage * num_chunks + c) + OPS[op]


def encode(order: Sequence[Sequence[Action]], num_chunks: int) -> Codes:
    """The order as numbers. Raises `PlanError` where it has actions that no costs are known of."""
    try:
        actions = integers([3 * (stage * num_chunks + c) + OPS[op] for row in order for op, stage, c in row])
    except KeyError as error:
        raise PlanError(
            f"an order has {', '.join(OPS)} and no {error.args[0]}: a planner says what recomputes by its layers"
        ) from None
    return Codes(actions, integers(accumulate(map(len, order), initial=0)))


def decode(codes: Codes, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    ops = tuple(OPS)
    actions = [Action(ops[code % 3], code // 3 // num_chunks, code // 3 % num_chunks) for code in map(int, codes.actions)]
    return tuple(tuple(actions[codes.starts[rank] : codes.starts[rank + 1]]) for rank in range(codes.num_ranks))
