"""The gradients of keys and values as attention's backward makes them, before they are added to anything.

A slice's are those of its whole prefix. Where query heads share key heads, kernels first make them for every query head
(FlashAttention does; and cuDNN, by its frontend's source in room for fp32). Heads do not mix inside attention, so where all of
that would be large, the backward runs by groups of key heads, each with its queries; plans and runs go by this file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST_BYTES = 1 << 30
"""Of it at one time, or one key head's where that is more."""


def heads_at_once(kv_heads: int, head_bytes: int, queries_per_key: int) -> int:
    """Key heads whose backward runs at once.

    Args:
        kv_heads: there are.
        head_bytes: keys and values of one head.
        queries_per_key: query heads that share it.
    """
    made = _times_made(queries_per_key)
    if kv_heads * head_bytes * made <= MOST_BYTES:
        return kv_heads
    return max(1, min(kv_heads, MOST_BYTES // (head_bytes * (made + 1))))


def fresh_bytes(
    keys: npt.NDArray[np.int64], kv_heads: int, head_bytes_per_key: float, queries_per_key: int
) -> npt.NDArray[np.float64]:
    """What there is at one time of the gradients of so many keys and values. It never falls with keys.

    Args:
        keys: that a chunk's queries see.
        kv_heads, queries_per_key: as for `heads_at_once`.
        head_bytes_per_key: a key and a value of one head.
    """
    made = _times_made(queries_per_key)
    one = np.maximum(MOST_BYTES, keys * (head_bytes_per_key * (made + 1)))
    whole = keys * (kv_heads * head_bytes_per_key * made)
    return np.where(all_at_once(keys, kv_heads, head_bytes_per_key, queries_per_key), whole, one)


def all_at_once(
    keys: npt.NDArray[np.int64], kv_heads: int, head_bytes_per_key: float, queries_per_key: int
) -> npt.NDArray[np.bool_]:
    """Where `heads_at_once` gives all heads."""
    return (keys * (kv_heads * head_bytes_per_key * _times_made(queries_per_key)) <= MOST_BYTES) | (kv_heads == 1)


def _times_made(queries_per_key: int) -> int:
    """How often, in the run's half precision: as they are, and in fp32 for every query head that shares them. A group of heads
    takes once more, because some kernels see addresses only and are given copies of its keys and values.
    """
    return 1 + (2 * queries_per_key if queries_per_key > 1 else 0)
