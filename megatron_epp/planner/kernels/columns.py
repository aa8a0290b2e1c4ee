"""Tables and orders as flat columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.planner.kernels.compiled import Floats, Integers, integers

FORWARD, BACKWARD, WEIGHT = range(3)
OPS = {Op.F: FORWARD, Op.B: BACKWARD, Op.W: WEIGHT}
"""The last digit of a code, base three."""


class Columns(NamedTuple):
    """The tables, by item: a stage and a chunk, numbered stage by stage. Names as in `Tables`.

    Attributes:
        num_rungs: steps of the longest recompute frontier. The columns `layer_us`, `saved` and `price` have a place per step of
            each item, item by item.
        price: time of recompute per byte it saves; infinite where it saves none.
        dear_us: of the dearest step.
        layers: of the item's stage.
        most: most recompute steps of the item.
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
