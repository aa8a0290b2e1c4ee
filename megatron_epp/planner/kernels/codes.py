"""Orders as numbers: one for every action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, product, starmap
from typing import Any, NamedTuple, TypeGuard, overload

import numpy as np

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan.operations import Track, operations
from megatron_epp.planner.kernels.compiled import IntegerList, integers

KIND_BITS = 3
"""Low bits of a code that hold the kind of an action."""
KIND_MASK = (1 << KIND_BITS) - 1

FORWARD, BACKWARD, WEIGHT = range(3)
"""Kinds whose bytes have columns of their own; kinds from `ADDED` on share `PassTable.added_takes` and the like."""
ADDED = 3

Kinds = tuple[Op, ...]
"""Operations of an order; the index of each is its kind."""

KINDS: Kinds = (Op.F, Op.B, Op.W)


def kinds_of(order: Sequence[Sequence[Action]]) -> Kinds:
    """Kinds of an order: the three common ones, then its added operations that planners have rows of."""
    used = {action.op for row in order for action in row}
    if used <= set(KINDS):
        return KINDS
    return KINDS + tuple(kind.op for kind in operations(Track.COMPUTE) if kind.op in used and kind.rows is not None)


class Codes(NamedTuple):
    """An order. An action is the number ``(site * num_chunks + chunk) << KIND_BITS | kind``.

    `actions` are of rank 0, then of rank 1, and so on. `starts` has where each rank's start, and the end.
    """

    actions: IntegerList
    starts: IntegerList
    kinds: Kinds = KINDS

    @property
    def num_ranks(self) -> int:
        return len(self.starts) - 1


Key = tuple[bytes, bytes, Kinds]


class CodedOrder(Sequence[tuple[Action, ...]]):
    """An order as numbers, whose actions are made when first asked for: a search reads only the best order's."""

    __slots__ = ("_rows", "codes", "num_chunks")

    def __init__(self, codes: Codes, num_chunks: int, rows: Sequence[Sequence[Action]] | None = None) -> None:
        self.codes, self.num_chunks = codes, num_chunks
        self._rows = None if rows is None else tuple(map(tuple, rows))

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        if self._rows is None:
            self._rows = decode(self.codes, self.num_chunks)
        return self._rows

    @property
    def key(self) -> Key:
        """Value by which equal orders of a chunk table, with the same `codes.kinds`, are found."""
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

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.rows,)  # a process that compiles has columns of another type than one that does not

    def __repr__(self) -> str:
        return repr(self.rows)


def coded(order: Sequence[Sequence[Action]], num_chunks: int) -> CodedOrder:
    """Return an order whose actions are numbers. Raises `PlanError` as `encode` does."""
    if _is_coded(order, num_chunks):
        return order
    return CodedOrder(encode_known(order, num_chunks), num_chunks, order)


def _is_coded(order: Sequence[Sequence[Action]], num_chunks: int) -> TypeGuard[CodedOrder]:
    return isinstance(order, CodedOrder) and order.num_chunks == num_chunks


def code_of(action: Action, num_chunks: int) -> int:
    """Return the number of a forward, a backward or a weight gradient (see `Codes`): every order numbers these alike."""
    op, site, c = action
    return (site * num_chunks + c) << KIND_BITS | KINDS.index(op)


def encode(order: Sequence[Sequence[Action]], num_chunks: int, kinds: Kinds = KINDS) -> Codes:
    """Return the order as numbers. Raises `PlanError` if it has actions without known costs."""
    if _is_coded(order, num_chunks) and order.codes.kinds == kinds[: len(order.codes.kinds)]:
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
    if _is_coded(order, num_chunks):
        return order.codes
    try:
        return encode(order, num_chunks)
    except PlanError:
        return encode(order, num_chunks, kinds_of(order))


def decode(codes: Codes, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    every = np.asarray(codes.actions, dtype=np.int64)
    num_sites = int((every >> KIND_BITS).max(initial=-1)) // num_chunks + 1 if num_chunks else 0
    known = _actions(codes.kinds, num_sites, num_chunks)
    actions = [known[number] for number in ((every & KIND_MASK) * num_sites * num_chunks + (every >> KIND_BITS)).tolist()]
    return tuple(tuple(actions[codes.starts[rank] : codes.starts[rank + 1]]) for rank in range(codes.num_ranks))


@lru_cache(maxsize=8)
def _actions(kinds: Kinds, num_sites: int, num_chunks: int) -> list[Action]:
    return list(starmap(Action, product(kinds, range(num_sites), range(num_chunks))))
