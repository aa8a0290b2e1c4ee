"""Prefixes that sequences of microbatches have in common, found from tokens in columns that frameworks use."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import le
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_epp.features.trees.prefixes import LEAST_TOKENS, num_shared
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of

_COLUMNS = ("tokens", "input_ids")
Tokens = NDArray[np.int64]


def borrowed_of(
    items: Sequence[Any], lengths: Sequence[tuple[int, ...]], most: Sequence[int], multiple: int
) -> tuple[Borrowed, ...]:
    """Return what sequences borrow of earlier ones, in multiples of tokens; empty for nothing, or where tokens are not found.

    Args:
        items: the microbatches, or of each what tells its tokens.
        lengths: of the sequences of each, padding included.
        most: that each sequence may borrow.
    """
    rows = [_rows_of(*each) for each in zip(items, lengths, strict=True)]
    if any(row is None for row in rows):
        return ()
    tokens, keys, borrowed = [own for row in rows for own in row or ()], list[tuple[bytes, int]](), list[Borrowed]()
    for q, (own, limit) in enumerate(zip(tokens, most, strict=True)):
        # Of all earlier sequences, one of its neighbours in the order of tokens begins with the most of its own.
        key = own.astype(">i4").tobytes(), q
        at = bisect(keys, key)
        near = [(num_shared(tokens[other], own), -other) for _, other in keys[max(0, at - 1) : at + 1]]
        shared, other = max(near, default=(0, 0))
        count = min(shared, limit) // multiple * multiple
        is_worth = count >= LEAST_TOKENS
        borrowed.append(Borrowed(path_of(-other, count, borrowed)[-1].sequence, count) if is_worth else NOTHING_BORROWED)
        keys.insert(at, key)
    return tuple(borrowed) if any(count for _, count in borrowed) else ()


def _rows_of(item: Any, lengths: Sequence[int]) -> list[Tokens] | None:
    """Return the tokens of each sequence, without padding where the column has none; None if there is no such column."""
    of_name = item.get if isinstance(item, Mapping) else lambda name, default: getattr(item, name, default)
    column, sizes = next((tokens for name in _COLUMNS if (tokens := of_name(name, None)) is not None), None), lengths
    if isinstance(column, Tensor):
        if column.is_nested:
            jagged: Any = column  # types do not know its methods
            column, sizes = jagged.values(), jagged.offsets().diff().tolist()
        if column.numel() != sum(sizes) or column.shape[-1] != column.numel():
            return None
        rows = np.split(column.flatten().cpu().numpy(), [*accumulate(sizes)][:-1])
    elif isinstance(column, (tuple, list)) and all(isinstance(row, Tensor) for row in column):
        rows = [row.cpu().numpy() for row in column]
    else:
        return None
    rows += [np.empty(0, dtype=np.int64)] * (len(lengths) - len(rows))  # behind a microbatch's sequences padding is one more
    is_whole = len(rows) == len(lengths) and all(row.ndim == 1 for row in rows)
    return rows if is_whole and all(map(le, map(len, rows), lengths)) else None
