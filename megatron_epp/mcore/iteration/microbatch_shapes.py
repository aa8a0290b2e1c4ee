"""Microbatches of a caller: taken from its iterator before an iteration, and handed back in the order of the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_epp.plan import EppError

_DEEPEST = 6
"""Levels of containers in which tensors of microbatches are looked for: the iteration's chunks, their items, and four more. Not
measured: deeper levels are seldom parts of a microbatch (see `tensor_bytes`)."""


class Microbatch(NamedTuple):
    """Shape of a microbatch: tokens of each sequence, of all of which stages exchange hidden states, and the second dimension
    of these, the number of `rows` that are not packed into one.
    """

    lengths: tuple[int, ...]
    rows: int = 1
    unread: tuple[int, ...] | None = None  # first tokens of each sequence whose logits nothing reads; None if unknown


class Microbatches:
    """Microbatches of one model chunk in one iteration. This base class is for a rank on which the caller has no iterator."""

    items: Sequence[Any] = ()
    """All of them, or of each what tells its lengths and tokens."""

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
    """Microbatches taken from an iterator, all of an iteration at once. Raises `EppError` if it has fewer than `count`."""

    def __init__(self, iterator: Iterator[Any], count: int, shape_of: Callable[[Any], Microbatch]) -> None:
        self.items: list[Any] = []
        for index in range(count):
            try:
                self.items.append(next(iterator))
            except StopIteration:
                raise EppError(f"the data iterator ended after {index} of {count} microbatches") from None
        self._shape_of = shape_of

    def shapes(self) -> tuple[Microbatch, ...]:
        return tuple(map(self._shape_of, self.items))

    def num_bytes(self, device: torch.device) -> int:
        return tensor_bytes(self.items, device)

    def at(self, index: int) -> Iterator[Any]:
        return _once(self.items[index], index)


def _once(item: Any, index: int) -> Iterator[Any]:
    yield item
    raise EppError(f"the forward step takes a second item for microbatch {index}; a plan needs one that takes a single item")


class ByOffset(Microbatches):
    """Microbatches of an iterator with random access: ``get_next(keys)`` reads the one at ``offset`` and advances the offset.
    The caller holds them whether or not they are taken, so they have no bytes here.
    """

    def __init__(self, iterator: Any, count: int, shape_of: Callable[[Any], Microbatch]) -> None:
        self._iterator, self._count, self._first, self._shape_of = iterator, count, iterator.offset, shape_of
        self.items = [self._known(index) for index in range(count)]

    def _known(self, index: int) -> Any:
        """Return the columns of lengths and tokens, or of lengths alone where others are not there."""
        with suppress(KeyError):
            return self.at(index).get_next(["total_lengths", "response_lengths", "tokens"])
        return self.at(index).get_next(["total_lengths"])

    def shapes(self) -> tuple[Microbatch, ...]:
        return tuple(map(self._shape_of, self.items))

    def at(self, index: int) -> Any:
        self._iterator.offset = self._first + index
        return self._iterator

    def finish(self) -> None:
        self._iterator.offset = self._first + self._count


def tensor_bytes(items: Any, device: torch.device) -> int:
    """Return the bytes of a device's tensors in mappings, sequences and objects' attributes, each storage once.

    Items may be nested `_DEEPEST` times: what lies deeper is more likely the data set or the model, which an item may refer to.
    Tensors without a storage (sparse ones) are not counted. A GPU is given with its index.
    """
    storages: dict[int, int] = {}
    level = [items]
    for _ in range(_DEEPEST):
        for value in level:
            is_plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) and value.layout is torch.strided
            if is_plain and value.device == device:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        level = [part for value in level for part in _parts(value)]
    return sum(storages.values())


def _parts(value: Any) -> Iterable[Any]:
    """Return a mapping's values, a sequence's items, the tensors that a subclass of tensors wraps (a jagged one, for instance),
    or the attributes of another object that is no module.
    """
    if is_traceable_wrapper_subclass(value):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, (Tensor, torch.nn.Module, ModuleType, type)):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return vars(value).values() if hasattr(value, "__dict__") else ()


def take(iterator: Any, count: int, shape_of: Callable[[Any], Microbatch]) -> Microbatches:
    """Take the microbatches of an iteration from an iterator, an object with ``get_next`` and ``offset``, or None. Raises
    `EppError` if the iterator is of another kind, or ends early.
    """
    if iterator is None:
        return Microbatches()
    if hasattr(iterator, "get_next") and hasattr(iterator, "offset"):
        return ByOffset(iterator, count, shape_of)
    if hasattr(iterator, "__next__"):
        return Taken(iterator, count, shape_of)
    raise EppError(f"the data iterator is a {type(iterator).__name__}, which has neither __next__ nor get_next with an offset")


class _Columns:
    """Columns of a microbatch by name: items of a mapping, or attributes of another object; None where there is none. `tokens`
    are ``[sequences, tokens]``, ``[tokens]`` or jagged.
    """

    def __init__(self, item: Any) -> None:
        self._item = item
        self.tokens = next((tokens for name in _TOKENS if isinstance(tokens := self.get(name), Tensor)), None)

    def get(self, name: str) -> Any:
        return self._item.get(name, None) if isinstance(self._item, Mapping) else getattr(self._item, name, None)

    def shape(self) -> Microbatch | None:
        """Return the shape by the first column of `_READERS` from which it can be read; None if there is no such column."""
        for name, read in _READERS.items():
            if (value := self.get(name)) is not None and (shape := read(value, self)) is not None:
                return shape
        return None


def shape_of(item: Any) -> Microbatch:
    """Find the shape of a microbatch, a mapping or an object, by the first of its columns from which it can be read.

    In a tuple or a list it is found in one of the parts, or if these are tensors in the first, ``[sequences, tokens]``. Raises
    `EppError` if there is no such column, or parts have different shapes.
    """
    if (shape := _shape(item)) is None:
        raise EppError(
            f"a microbatch is a {_described(item)}, in which no lengths are found ({', '.join(_READERS)}): give the function "
            "that finds them, shape_of"
        )
    return shape


def _shape(item: Any) -> Microbatch | None:
    if isinstance(item, Tensor):
        return _by_tokens(item) if item.dim() == 2 and not item.is_floating_point() else None
    if not isinstance(item, (tuple, list)) or hasattr(item, "_fields"):
        return _Columns(item).shape()
    parts = [part for part in item if not isinstance(part, Tensor)]
    shapes = dict.fromkeys(shape for part in parts if (shape := _shape(part)) is not None)
    if len(shapes) > 1:
        sizes = " and ".join(f"{sum(shape.lengths)} tokens in {len(shape.lengths)} sequences" for shape in shapes)
        raise EppError(f"parts of a microbatch have {sizes}: give the function that finds its lengths, shape_of")
    return next(iter(shapes), None) or next((_shape(part) for part in item if isinstance(part, Tensor)), None)


def _described(item: Any) -> str:
    kind = type(item).__name__
    if isinstance(item, (tuple, list)):
        return f"{kind} of {', '.join(type(part).__name__ for part in item) or 'nothing'}"
    return f"{kind} with {', '.join(map(str, item)) or 'nothing'}" if isinstance(item, Mapping) else kind


def _by_ends(value: Any, columns: _Columns) -> Microbatch | None:
    """Read the ends of packed sequences, ``[sequences + 1]`` or one such row for each row of tokens; -1 marks unused entries.
    Tokens behind the last end, which stages exchange too, count as one more sequence.
    """
    rows = _integers(value)
    length = 0 if columns.tokens is None else columns.tokens.numel() // max(1, len(rows))
    marks = [sorted({0, *(end for end in row if end >= 0), *([length] if length > max(row) else [])}) for row in rows if row]
    lengths = tuple(end - start for row in marks for start, end in pairwise(row))
    return Microbatch(lengths, len(rows)) if lengths else None


def _by_lengths(value: Any, columns: _Columns) -> Microbatch | None:
    """Read the lengths of packed sequences; tokens behind them count as one more. None if there are several rows of tokens."""
    lengths, tokens = [length for row in _integers(value) for length in row if length], columns.tokens
    if tokens is not None and not tokens.is_nested:
        if tokens.dim() > 1 and len(tokens) > 1:
            return None
        lengths += [rest] if (rest := tokens.numel() - sum(lengths)) > 0 else []
    return Microbatch(tuple(lengths)) if lengths else None


def _by_positions(value: Any, columns: _Columns) -> Microbatch | None:
    """Read where positions begin again at 0; they have the tokens' shape or, with several coordinates, ``[n, *that shape]``.
    Several zeros in a row are padding, of one sequence. With a mask of pairs of tokens, a row is one sequence to attention.
    """
    tokens, mask = columns.tokens, columns.get("attention_mask")
    if not isinstance(value, Tensor) or tokens is None or tokens.is_nested or tokens.dim() > 2:
        return None
    has_pairs = isinstance(mask, Tensor) and not mask.is_nested and mask.dim() > 1 and mask.shape[-2] == tokens.shape[-1]
    if has_pairs or not tokens.numel() or value.is_nested or value.shape[value.dim() - tokens.dim() :] != tokens.shape:
        return None
    zeros = (value == 0).reshape(-1, *tokens.shape).all(dim=0).reshape(-1, tokens.shape[-1])
    starts = zeros.clone()
    starts[:, 1:] &= ~zeros[:, :-1]
    starts[:, 0] = True
    marks = [*starts.flatten().nonzero().flatten().tolist(), tokens.numel()]
    return Microbatch(tuple(end - start for start, end in pairwise(marks)), len(starts))


def _by_tokens(value: Any, _: _Columns | None = None) -> Microbatch | None:
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return Microbatch(tuple(len(row) for row in value.unbind() if len(row)))
    rows, length = (1, value.numel()) if value.dim() == 1 else value.shape[:2]
    return Microbatch((length,) * rows, rows)


def _by_parameters(value: Any, columns: _Columns) -> Microbatch | None:
    return next((_by_ends(ends, columns) for name in _ENDS if (ends := getattr(value, name, None)) is not None), None)


def _integers(value: Any) -> list[list[int]]:
    """Return rows of integers of a tensor or array with up to two dimensions, or a sequence; none of anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (tuple, list)):
        return []
    return [list(map(int, row)) for row in (value if value and isinstance(value[0], (tuple, list)) else [value])]


_TOKENS = ("tokens", "input_ids")
_ENDS = ("cu_seqlens_q_padded", "cu_seqlens_padded", "cu_seqlens_q", "cu_seqlens")
_READERS: dict[str, Callable[[Any, _Columns], Microbatch | None]] = {
    "packed_seq_params": _by_parameters,
    **dict.fromkeys(_ENDS, _by_ends),
    **dict.fromkeys(("total_lengths", "seq_lens"), _by_lengths),
    "position_ids": _by_positions,
    **dict.fromkeys(_TOKENS, _by_tokens),
}
"""Columns that tell the shape of a microbatch, and how they are read: with padding before without, packed before rows."""
