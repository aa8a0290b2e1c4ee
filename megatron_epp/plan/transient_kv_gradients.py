"""Memory of the gradients of keys and values that attention's backward makes, before they are accumulated.

Those of a slice cover its whole prefix. If query heads share key heads, kernels first make them for every query head
(FlashAttention does; and so does cuDNN, according to its frontend's source, in buffers of fp32 size). Heads do not mix inside
attention, so if all of that would be large, the backward runs by groups of key heads, each with its queries. Plans and runs
both use this module.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST_BYTES = 1 << 30
"""Largest size of these gradients at one time, unless those of a single key head are larger."""


def heads_at_once(kv_heads: int, head_bytes: int, queries_per_key: int) -> int:
    """Number of key heads whose backward runs at once.

    Args:
        kv_heads: number of key heads.
        head_bytes: bytes of keys and values of one head.
        queries_per_key: query heads that share it.
    """
    made = _times_made(queries_per_key)
    if kv_heads * head_bytes * made <= MOST_BYTES:
        return kv_heads
    return max(1, min(kv_heads, MOST_BYTES // (head_bytes * (made + 1))))


def transient_kv_gradient_bytes(
    keys: npt.NDArray[np.int64], kv_heads: int, head_bytes_per_key: float, queries_per_key: int
) -> npt.NDArray[np.float64]:
    """Bytes held at one time by the newly made gradients of a number of keys and values. Non-decreasing in `keys`.

    Args:
        keys: number of keys that a chunk's queries attend to.
        kv_heads, queries_per_key: as for `heads_at_once`.
        head_bytes_per_key: bytes of a key and a value of one head.
    """
    made = _times_made(queries_per_key)
    one = np.maximum(MOST_BYTES, keys * (head_bytes_per_key * (made + 1)))
    whole = keys * (kv_heads * head_bytes_per_key * made)
    return np.where(all_at_once(keys, kv_heads, head_bytes_per_key, queries_per_key), whole, one)


def all_at_once(
    keys: npt.NDArray[np.int64], kv_heads: int, head_bytes_per_key: float, queries_per_key: int
) -> npt.NDArray[np.bool_]:
    """True where `heads_at_once` returns all heads."""
    return (keys * (kv_heads * head_bytes_per_key * _times_made(queries_per_key)) <= MOST_BYTES) | (kv_heads == 1)


def _times_made(queries_per_key: int) -> int:
    """Memory of the gradients in multiples of their half-precision size: once as they are, and in fp32 for every query head
    that shares them. A group of heads takes one more, because some kernels only take addresses and need copies of its keys
    and values.
    """
    return 1 + (2 * queries_per_key if queries_per_key > 1 else 0)
