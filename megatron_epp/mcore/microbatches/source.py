"""Microbatches of a caller: taken from its iterator before an iteration, and handed back in the order of the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.plan import EppError

_DEEPEST = 6
"""Levels of containers in which tensors of microbatches are looked for: the iteration's chunks, their items, and four more."""


class Microbatch(NamedTuple):
    """Shape of a microbatch.

    Attributes:
        lengths: tokens of each sequence; stages exchange hidden states of all of them.
        rows: second dimension of the hidden states: sequences that are not packed into one row.
    """

    lengths: tuple[int, ...]
    rows: int = 1


class Microbatches:
    """Microbatches of one model chunk in one iteration; as it stands, those of a rank on which the caller has no iterator."""

    def shapes(self) -> tuple[Microbatch, ...] | None:
        """Return the shape of every microbatch; None if the caller has no data on this rank."""
        return None

    def num_bytes(self, device: torch.device) -> int:
        """Return the bytes on a device that are held because all microbatches are taken at once."""
        return 0

    def at(self, index: int) -> Any:
        """Return the iterator whose next item is microbatch `index`, for the caller's forward step."""
        return None

    def finish(self) -> None:
        """Leave the caller's iterator behind the last microbatch of the iteration."""


class Taken(Microbatches):
    """Microbatches taken from an iterator, all of an iteration at once.

    Args:
        iterator: the caller's; it gives `count` items.
        count: microbatches of the iteration.
        shape_of: shape of an item.

    Raises:
        EppError: the iterator ends early.
    """

    def __init__(self, iterator: Iterator[Any], count: int, shape_of: Callable[[Any], Microbatch]) -> None:
        self._items: list[Any] = []
        for index in range(count):
            try:
                self._items.append(next(iterator))
            except StopIteration:
                raise EppError(f"the data iterator ended after {index} of {count} microbatches") from None
        self._shape_of = shape_of

    def shapes(self) -> tuple[Microbatch, ...]:
        return tuple(map(self._shape_of, self._items))

    def num_bytes(self, device: torch.device) -> int:
        return tensor_bytes(self._items, device)

    def at(self, index: int) -> Iterator[Any]:
        return _One(self._items[index], index)


class _One:
    """Iterator over a single microbatch."""

    def __init__(self, item: Any, index: int) -> None:
        self._items, self._index = [item], index

    def __iter__(self) -> _One:
        return self

    def __next__(self) -> Any:
        if not self._items:
            raise EppError(
                f"the forward step takes a second item for microbatch {self._index}; a plan needs one that takes a single item"
            )
        return self._items.pop()


class ByOffset(Microbatches):
    """Microbatches of an iterator with random access: ``get_next(keys)`` reads the one at ``offset`` and advances that.

    The caller holds them whether or not they are taken, so they have no bytes here.

    Args:
        iterator: the caller's.
        count: microbatches of the iteration.
        shape_of: shape of a microbatch, given its columns.
        keys: columns that are read to find lengths.
    """

    def __init__(
        self, iterator: Any, count: int, shape_of: Callable[[Any], Microbatch], keys: Sequence[str] = ("total_lengths",)
    ) -> None:
        self._iterator, self._count, self._first = iterator, count, iterator.offset
        self._shape_of, self._keys = shape_of, list(keys)

    def shapes(self) -> tuple[Microbatch, ...]:
        return tuple(self._shape_of(self.at(index).get_next(self._keys)) for index in range(self._count))

    def at(self, index: int) -> Any:
        self._iterator.offset = self._first + index
        return self._iterator

    def finish(self) -> None:
        self._iterator.offset = self._first + self._count


def tensor_bytes(items: Any, device: torch.device) -> int:
    """Return the bytes of tensors on a device, each storage once; tensors without a storage (sparse ones) are not counted.

    Args:
        items: mappings, sequences and objects with tensors as attributes, nested at most `_DEEPEST` times. What lies deeper is
            more likely the data set or the model, which an item may refer to, than a part of the item.
        device: with its index, if it is a GPU.
    """
    storages: dict[int, int] = {}
    level = [items]
    for _ in range(_DEEPEST):
        for one in level:
            if isinstance(one, Tensor) and one.device == device and one.layout is torch.strided:
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        level = [part for one in level for part in _parts(one)]
    return sum(storages.values())


def _parts(one: Any) -> Iterable[Any]:
    """Return the values of a mapping, the items of a sequence, or the attributes of another object that is no module."""
    if isinstance(one, (Tensor, torch.nn.Module, ModuleType, type)):
        return ()
    if isinstance(one, Mapping):
        return one.values()
    if isinstance(one, (list, tuple, set, deque)):
        return one
    if is_dataclass(one):
        return [getattr(one, field.name) for field in fields(one)]
    return vars(one).values() if hasattr(one, "__dict__") else ()


def take(iterator: Any, count: int, shape_of: Callable[[Any], Microbatch]) -> Microbatches:
    """Take the microbatches of an iteration from a caller's iterator.

    Args:
        iterator: an iterator, an object with ``get_next`` and ``offset``, or None.
        count: number of microbatches.
        shape_of: shape of a microbatch.

    Raises:
        EppError: the iterator is of another kind, or ends early.
    """
    if iterator is None:
        return Microbatches()
    if hasattr(iterator, "get_next") and hasattr(iterator, "offset"):
        return ByOffset(iterator, count, shape_of)
    if hasattr(iterator, "__next__"):
        return Taken(iterator, count, shape_of)
    raise EppError(f"the data iterator is a {type(iterator).__name__}, which has neither __next__ nor get_next with an offset")


def shape_of(item: Any) -> Microbatch:
    """Find the shape of a microbatch.

    Packed sequences are found by ``cu_seqlens`` (with padding, where ``cu_seqlens_padded`` or the tokens say so), others by the
    shape ``[sequences, tokens]`` of ``tokens`` or ``input_ids``.

    Raises:
        EppError: the item has none of these.
    """
    if isinstance(item, (tuple, list)) and len(item) == 1:
        item = item[0]
    if not isinstance(item, Mapping):
        raise EppError(f"a microbatch is a {type(item).__name__}: give the function that finds lengths in it, shape_of")
    tokens = next((item[name] for name in ("tokens", "input_ids") if isinstance(item.get(name), Tensor)), None)
    for name in ("cu_seqlens_padded", "cu_seqlens"):
        if isinstance(ends := item.get(name), Tensor) and ends.numel():
            return _packed(ends.reshape(-1), None if tokens is None else tokens.numel())
    if (totals := item.get("total_lengths")) is not None:
        return Microbatch(tuple(int(one) for one in totals))
    if tokens is None:
        raise EppError(
            f"a microbatch has {', '.join(map(str, item)) or 'nothing'}, but neither tokens nor input_ids nor cu_seqlens: give "
            "the function that finds lengths in it, shape_of"
        )
    if tokens.dim() == 1:
        return Microbatch((tokens.numel(),))
    rows, length = tokens.shape
    return Microbatch((length,) * rows, rows)


def _packed(ends: Tensor, num_tokens: int | None) -> Microbatch:
    """Return the lengths between the ends of packed sequences; tokens behind the last one, which stages exchange too, are one
    more."""
    marks = sorted(set(ends.tolist()) | {0})
    if num_tokens is not None and num_tokens > marks[-1]:
        marks.append(num_tokens)
    return Microbatch(tuple(int(end - start) for start, end in pairwise(marks)))
