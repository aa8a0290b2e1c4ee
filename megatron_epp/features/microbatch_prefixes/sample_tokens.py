"""Prefixes that sequences of microbatches have in common, found from tokens in columns that frameworks use."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_epp.features.trees.prefixes import LEAST_TOKENS, num_shared
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of

_COLUMNS = ("tokens", "input_ids")
Tokens = NDArray[np.int64]


def borrowed_of(items: Sequence[Any], lengths: Sequence[tuple[int, ...]], multiple: int) -> tuple[Borrowed, ...]:
    """Return what sequences borrow of earlier ones, in multiples of tokens; empty for nothing, or where tokens are not found.

    Args:
        items: the microbatches, or of each what tells its tokens.
        lengths: of the sequences of each, padding included.
    """
    rows = [_rows_of(*each) for each in zip(items, lengths, strict=True)]
    if any(row is None for row in rows):
        return ()
    tokens, keys = [own for row in rows for own in row or ()], list[tuple[bytes, int]]()
    borrowed = list[Borrowed]()
    for q, (own, length) in enumerate(zip(tokens, (length for each in lengths for length in each), strict=True)):
        # Of all earlier sequences, one of its neighbours in the order of tokens begins with the most of its own.
        key = own.astype(">i4").tobytes(), q
        at = bisect(keys, key)
        near = [(num_shared(tokens[other], own), -other) for _, other in keys[max(0, at - 1) : at + 1]]
        shared, other = max(near, default=(0, 0))
        most = min(shared, length - 1) // multiple * multiple
        is_worth = most >= LEAST_TOKENS
        borrowed.append(Borrowed(path_of(-other, most, borrowed)[-1].sequence, most) if is_worth else NOTHING_BORROWED)
        keys.insert(at, key)
    return tuple(borrowed) if any(count for _, count in borrowed) else ()


def _rows_of(item: Any, lengths: Sequence[int]) -> list[Tokens] | None:
    """Return the tokens of each sequence, without padding where the column has none; None if there is no such column."""
    of_name = item.get if isinstance(item, Mapping) else lambda name, default: getattr(item, name, default)
    column = next((tokens for name in _COLUMNS if (tokens := of_name(name, None)) is not None), None)
    if isinstance(column, Tensor) and column.is_nested:
        column = column.unbind()
    elif isinstance(column, Tensor):
        if column.numel() != sum(lengths) or column.shape[-1] != column.numel():
            return None
        flat = column.flatten().cpu()
        column = [flat[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
    if not isinstance(column, (tuple, list)) or not all(isinstance(row, Tensor) and row.dim() == 1 for row in column):
        return None
    # Behind a microbatch's sequences its padding counts as one more.
    rows = [row.cpu().numpy() for row in column] + [np.empty(0, dtype=np.int64)] * (len(lengths) - len(column))
    return (
        rows if len(rows) == len(lengths) and all(len(own) <= most for own, most in zip(rows, lengths, strict=True)) else None
    )
