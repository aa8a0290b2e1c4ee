"""Tables and orders as flat columns of numbers, and sums over a column's recompute steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from functools import lru_cache
from itertools import accumulate, product, starmap
from typing import NamedTuple, overload

import numpy as np

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan.operations import Collective, Message, Track, operation, operations
from megatron_epp.plan.relations import resolve
from megatron_epp.planner.kernels.compiled import Floats, Integers, Numbers, compiled, floats, integers

KIND_BITS = 3
"""Low bits of a code that hold the kind of an action."""
KIND_MASK = (1 << KIND_BITS) - 1

FORWARD, BACKWARD, WEIGHT = range(3)
"""Kinds whose bytes have columns of their own; those of `ADDED` and above have theirs in `Columns.added_takes` and so on."""
ADDED = 3

Kinds = tuple[Op, ...]
"""Operations of an order; the index of each is its kind."""

KINDS: Kinds = (Op.F, Op.B, Op.W)


def kinds_of(order: Sequence[Sequence[Action]]) -> Kinds:
    """Kinds of an order: the three common ones, then those of added operations that it has and that planners have rows of."""
    used = {action.op for row in order for action in row}
    if used <= set(KINDS):
        return KINDS
    return KINDS + tuple(kind.op for kind in operations(Track.COMPUTE) if kind.op in used and kind.rows is not None)


class Columns(NamedTuple):
    """The tables, by item: a stage and a chunk, numbered stage by stage. Names as in `Tables`.

    Attributes:
        num_items: items of the kind of action that has most sites; for all but added kinds, stages times chunks.
        num_frontier_steps: steps of the longest recompute frontier. The columns `layer_us`, `saved` and `price` have an entry
            per step of each item, item by item.
        price: time of recompute per byte it saves; infinite where it saves none.
        dear_us: of the dearest step.
        num_layers: of the item's stage.
        most: most recompute steps of the item.
        need_starts, needs, need_us: for each node, the nodes on other sites that it waits for, and the time of the transfer. A
            node is a kind and an item, numbered kind by kind. Needs on its own site follow from a legal order.
        action_us: time of each node, of a backward without recompute and with its weight gradient.
        spared_us: by which the backward is shorter without its weight gradient.
        added_takes, added_gives: bytes of added operations, by node behind the three common kinds.
    """

    num_stages: int
    num_chunks: int
    num_frontier_steps: int
    num_items: int
    rank_of: Integers
    static: Integers
    layer_us: Floats
    price: Floats
    dear_us: Floats
    num_layers: Integers
    most: Integers
    activation: Integers
    saved: Integers
    fuller: Integers
    forward_alloc: Integers
    forward_free: Integers
    head: Integers
    release_per_layer: Integers
    layer_peak: Integers
    constant: Integers
    half_peak: Integers
    first_mlp: Integers
    residual: Integers
    weight_bytes: Integers
    weight_layer: Integers
    split_layer_peak: Integers
    need_starts: Integers
    needs: Integers
    need_us: Floats
    action_us: Floats
    spared_us: Floats
    added_takes: Integers
    added_gives: Integers


class Codes(NamedTuple):
    """An order. An action is the number ``(site * num_chunks + chunk) << KIND_BITS | kind``.

    Attributes:
        actions: of rank 0, then of rank 1, and so on.
        starts: where each rank's actions start, and the end.
        kinds: operations of the order, which the actions count.
    """

    actions: Integers
    starts: Integers
    kinds: Kinds = KINDS

    @property
    def num_ranks(self) -> int:
        return len(self.starts) - 1


class CodedOrder(Sequence[tuple[Action, ...]]):
    """An order as numbers, whose actions are made when first asked for: a search reads those of the best order alone.

    Attributes:
        codes: the numbers.
        num_chunks: of the chunk table.
    """

    __slots__ = ("_rows", "codes", "num_chunks")

    def __init__(self, codes: Codes, num_chunks: int) -> None:
        self.codes, self.num_chunks = codes, num_chunks
        self._rows: tuple[tuple[Action, ...], ...] | None = None

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank."""
        if self._rows is None:
            self._rows = decode(self.codes, self.num_chunks)
        return self._rows

    @property
    def key(self) -> tuple[bytes, bytes, Kinds]:
        """Value that orders of one chunk table share if they are equal."""
        actions, starts, kinds = self.codes
        return np.asarray(actions, dtype=np.int64).tobytes(), np.asarray(starts, dtype=np.int64).tobytes(), kinds

    def __len__(self) -> int:
        return self.codes.num_ranks

    @overload
    def __getitem__(self, at: int) -> tuple[Action, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[Action, ...], ...]: ...

    def __getitem__(self, at: int | slice) -> tuple[Action, ...] | tuple[tuple[Action, ...], ...]:
        return self.rows[at]

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CodedOrder) and self.num_chunks == other.num_chunks and self.codes.kinds == other.codes.kinds:
            return self.key == other.key
        return isinstance(other, Sequence) and self.rows == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.rows)


def coded(order: Sequence[Sequence[Action]], num_chunks: int) -> CodedOrder:
    """Return an order as numbers, which keeps its actions. Raises `PlanError` as `encode` does.

    Args:
        order: actions of every rank.
        num_chunks: of the chunk table.
    """
    return order if isinstance(order, CodedOrder) else CodedOrder(encode_known(order, num_chunks), num_chunks)


def by_node(tables: Sequence[Sequence[Sequence[float]]], num_items: int, dtype: type) -> Numbers:
    """Flatten ``[site][chunk]`` tables one after another, each filled with zeros to `num_items` entries.

    Args:
        tables: by kind of action.
        num_items: `Columns.num_items`.
        dtype: of the result.
    """
    found: Numbers = np.zeros((len(tables), num_items), dtype=dtype)
    for row, table in zip(found, tables, strict=True):
        values = stacked(table, dtype).ravel()
        row[: len(values)] = values
    return found.ravel()


def stacked(rows: Sequence[Sequence[float]], dtype: type | None = None) -> Numbers:
    """Return rows as one array. Stages with equal costs share a row, which is converted once.

    Args:
        rows: equally long.
        dtype: of the result; None for that of the rows.
    """
    arrays: dict[int, Numbers] = {}
    for row in rows:
        if id(row) not in arrays:
            arrays[id(row)] = np.array(row, dtype=dtype)
    found: Numbers = np.array([arrays[id(row)] for row in rows], dtype=dtype)
    return found


def need_columns(
    kinds: Kinds,
    rank_of: Sequence[int],
    num_items: int,
    num_chunks: int,
    transfer_us: Callable[[Message | Collective | None, int], Sequence[float]],
) -> tuple[Integers, Integers, Floats]:
    """Resolve the table of operations into `Columns.need_starts`, `needs` and `need_us`.

    Args:
        kinds: operations of the orders that are to be timed.
        rank_of: the rank of each stage.
        num_items: `Columns.num_items`.
        num_chunks: of the chunk table.
        transfer_us: times by chunk of a transfer over the boundary behind a stage.
    """
    starts, needs, carried = _needs(kinds, tuple(rank_of), num_items, num_chunks)
    times_us = [stacked([transfer_us(*one) for one in site]).T.ravel() for site in carried]
    return integers(starts), integers(needs), floats(np.concatenate([np.zeros(0), *times_us]))


type Carried = tuple[Message | Collective | None, int]
"""A transfer, and the lower of the stages at the boundary that it crosses."""


@lru_cache(maxsize=16)
def _needs(
    kinds: Kinds, rank_of: tuple[int, ...], num_items: int, num_chunks: int
) -> tuple[Numbers, Numbers, list[list[Carried]]]:
    """Return `Columns.need_starts` and `needs`, and the transfers for every kind and site that has needs.

    Args:
        kinds, rank_of, num_items, num_chunks: as for `need_columns`.
    """
    number, chunks = {op: kind for kind, op in enumerate(kinds)}, np.arange(num_chunks)
    per_node = np.zeros(len(kinds) * num_items, dtype=np.int64)
    needs, carried = [np.zeros(0, dtype=np.int64)], []
    for kind, op in enumerate(kinds):
        sites = operation(op).sites
        for site in range(len(sites(rank_of))):
            related = [
                one
                for one in resolve(op, site, rank_of)
                if one.op in number and not (one.site == site and operation(one.op).sites is sites)
            ]
            first = kind * num_items + site * num_chunks
            per_node[first : first + num_chunks] = len(related)
            if related:
                nodes = [number[one.op] * num_items + one.site * num_chunks + chunks for one in related]
                needs.append(np.stack(nodes, axis=1).ravel())
                carried.append([(one.need.carries, min(site, one.site)) for one in related])
    return np.concatenate([[0], np.cumsum(per_node)]), np.concatenate(needs), carried


def code_of(action: Action, num_chunks: int) -> int:
    """Return the number of an action (see `Codes`).

    Args:
        action: a forward, a backward or a weight gradient; every order numbers these operations alike.
        num_chunks: of the chunk table.
    """
    op, site, c = action
    return (site * num_chunks + c) << KIND_BITS | KINDS.index(op)


def encode(order: Sequence[Sequence[Action]], num_chunks: int, kinds: Kinds = KINDS) -> Codes:
    """Return the order as numbers. Raises `PlanError` if it has actions without known costs.

    Args:
        order: actions of every rank.
        num_chunks: of the chunk table.
        kinds: operations of the order.
    """
    if isinstance(order, CodedOrder) and order.codes.kinds == kinds[: len(order.codes.kinds)]:
        return order.codes._replace(kinds=kinds)
    number = {op: kind for kind, op in enumerate(kinds)}
    try:
        actions = integers([(site * num_chunks + c) << KIND_BITS | number[op] for row in order for op, site, c in row])
    except KeyError as error:
        raise PlanError(
            f"an order has {', '.join(kinds)} and no {error.args[0]}: a planner says what recomputes by its layers"
        ) from None
    return Codes(actions, integers(accumulate(map(len, order), initial=0)), kinds)


def encode_known(order: Sequence[Sequence[Action]], num_chunks: int) -> Codes:
    """Return an order as numbers, with added operations that planners have rows of. Raises `PlanError` as `encode` does."""
    if isinstance(order, CodedOrder):
        return order.codes
    try:
        return encode(order, num_chunks)
    except PlanError:
        return encode(order, num_chunks, kinds_of(order))


def decode(codes: Codes, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order that numbers stand for.

    Args:
        codes: the numbers.
        num_chunks: of the chunk table.
    """
    every = np.asarray(codes.actions, dtype=np.int64)
    num_sites = int((every >> KIND_BITS).max(initial=-1)) // num_chunks + 1 if num_chunks else 0
    known = _actions(codes.kinds, num_sites, num_chunks)
    actions = [known[number] for number in ((every & KIND_MASK) * num_sites * num_chunks + (every >> KIND_BITS)).tolist()]
    return tuple(tuple(actions[codes.starts[rank] : codes.starts[rank + 1]]) for rank in range(codes.num_ranks))


@lru_cache(maxsize=8)
def _actions(kinds: Kinds, num_sites: int, num_chunks: int) -> list[Action]:
    """Return all actions, by kind, site and chunk: a search decodes many orders of one table.

    Args:
        kinds: operations of the orders.
        num_sites: the largest number of a site, plus one.
        num_chunks: of the chunk table.
    """
    return list(starmap(Action, product(kinds, range(num_sites), range(num_chunks))))


@compiled
def frontier_sum[N: (int, float)](values: MutableSequence[N], first: int, num_layers: int, num_steps: int) -> N:
    """Sum the values of the first recompute steps (`memory.frontier`); each mode has as many steps as the stage has layers.

    Args:
        values: value of one step, by mode.
        first: index of the item's first mode in `values`.
        num_layers: layers of the stage.
        num_steps: number of steps.
    """
    at, left = first, num_steps
    total = values[first] * 0
    while left > num_layers:
        total += num_layers * values[at]
        left -= num_layers
        at += 1
    return total + left * values[at]
