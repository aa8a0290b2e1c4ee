"""Sizes that plans and runs compute alike: classes of KV buffers, transient dK/dV, precision of sums, heads, blocks of a loss.

**Size classes.** Lengths change with every batch. If each buffer were as long as its sequence, the gaps that an iteration
leaves would not fit the next one's buffers, and become unusable. So buffers of slightly different length take the same memory.

**Transient dK/dV.** Attention's backward makes the gradients of a slice's keys and values, which cover its whole prefix, before
they are accumulated. If query heads share key heads, kernels first make them for every query head (FlashAttention does; and so
does cuDNN, according to its frontend's source, in buffers of fp32 size). Heads do not mix inside attention, so if all of that
would be large, the backward runs by groups of key heads, each with its queries.

**Shared heads.** Context-parallel ranks have as many heads each. Where these do not divide, heads of zeros are added, whose
outputs and gradients are dropped: every rank takes as long as the one that has most.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.shape_classes import token_class

FP32_BYTES = 4
BLOCK_BYTES = 2**30
"""Size of a block's fp32 logits if the number of tokens of a block is not set. With a vocabulary of 128,256 a block has 2,048
tokens, so that the matrix products reach 94 % of their rate (`Rates.saturation_tokens`)."""
SIZES_PER_OCTAVE = 8
"""Number of sizes between a power of two and the next, so that at most an eighth of a buffer is unused."""


def size_class(count: int) -> int:
    """Tokens of the buffer for a number of tokens: the next size class."""
    return int(size_classes(np.asarray(count, dtype=np.int64)))


def size_classes(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Vectorized `size_class`."""
    _, digits = np.frexp(counts)
    step = np.left_shift(np.int64(1), np.maximum(digits.astype(np.int64) - SIZES_PER_OCTAVE.bit_length(), 0))
    return -(-counts // step) * step


MOST_TRANSIENT_BYTES = 1 << 30
"""Most bytes of transient dK/dV at one time, unless a single key head has more. Not measured: less would launch more kernels
for the same work, more would take memory from activations.
"""


def heads_at_once(kv_heads: int, head_bytes: int, queries_per_key: int) -> int:
    """Number of key heads whose backward runs at once: a divisor of all, so that kernels see one number of them.

    `head_bytes` are of keys and values of one head, which `queries_per_key` query heads share.
    """
    times_made = _times_made(queries_per_key)
    if kv_heads * head_bytes * times_made <= MOST_TRANSIENT_BYTES:
        return kv_heads
    most = max(1, min(kv_heads, MOST_TRANSIENT_BYTES // (head_bytes * (times_made + 1))))
    return next(count for count in range(most, 0, -1) if kv_heads % count == 0)


def transient_kv_gradient_bytes(
    keys: npt.NDArray[np.int64], kv_heads: int, head_bytes_per_key: float, queries_per_key: int
) -> npt.NDArray[np.float64]:
    """Bytes held at one time by the newly made gradients of a number of keys and values, non-decreasing in `keys`.

    `head_bytes_per_key` are of a key and a value of one head; the rest is as in `heads_at_once`.
    """
    times_made = _times_made(queries_per_key)
    in_groups = np.maximum(MOST_TRANSIENT_BYTES, keys * (head_bytes_per_key * (times_made + 1)))
    whole = keys * (kv_heads * head_bytes_per_key * times_made)
    return np.where(all_at_once(keys, kv_heads, head_bytes_per_key, queries_per_key), whole, in_groups)


def all_at_once(
    keys: npt.NDArray[np.int64], kv_heads: int, head_bytes_per_key: float, queries_per_key: int
) -> npt.NDArray[np.bool_]:
    """True where `heads_at_once` returns all heads."""
    return (keys * (kv_heads * head_bytes_per_key * _times_made(queries_per_key)) <= MOST_TRANSIENT_BYTES) | (kv_heads == 1)


def expanded_at_once(keys: int, heads: int, head_bytes_per_key: float) -> int:
    """Number of heads, a divisor of all, whose keys and values are made of latents at one time, in a forward as in a backward,
    which also holds their gradients. `head_bytes_per_key` are of a key and a value of one head.
    """
    return heads_at_once(heads, math.ceil(2 * token_class(keys) * head_bytes_per_key), 1)


def _times_made(queries_per_key: int) -> int:
    """Memory of the gradients in multiples of their half-precision size: once as they are, and in fp32 for every query head
    that shares them. A group of heads takes one more, because some kernels only take addresses and need copies of its keys
    and values.
    """
    return 1 + (2 * queries_per_key if queries_per_key > 1 else 0)


def shared_heads(kv_heads: int, queries_per_key: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of key heads, and of query heads for each, with which context-parallel ranks share query heads evenly.

    Neither is below the given one, and query heads are the fewest possible in all: no more where the ranks divide them.
    """

    def enough(keys: int) -> tuple[int, int]:
        step = ranks // math.gcd(keys, ranks)
        return keys, -(-queries_per_key // step) * step

    return min(map(enough, range(kv_heads, kv_heads + ranks)), key=math.prod)


FP32_CHOICES = ("auto", "on", "off")
"""Choices for sums in fp32: for sequences with many slices, always, or never."""

MOST_ROUNDED_SLICES = 8
"""Largest number of slices for which `auto` keeps sums in the run's precision. A sum in bf16 rounds once for every slice. With
8 random slices keys' gradients have 1.3 times the error of sums in fp32, where attention's own rounding is all; with 128 slices
2.3 times, and the error grows further.
"""


def sums_in_fp32(choice: str, num_slices: int) -> bool:
    """True if a sequence's sums are in fp32, independent of the precision of the added gradients."""
    return choice == "on" or (choice == "auto" and num_slices > MOST_ROUNDED_SLICES)


def loss_block_tokens(setting: str | int, vocabulary: int, longest: int) -> int:
    """Tokens of a block of the loss; 0 if the logits of a whole chunk are computed at once.

    A block's backward recomputes its logits, one more product with the output layer's weight. So ``auto`` uses blocks only if
    the fp32 logits of the `longest` sequence on a rank (0 if unknown) would take more than the bytes of two blocks.
    """
    if setting != AUTO:
        return int(setting)
    per_token = FP32_BYTES * vocabulary
    if longest * per_token <= 2 * BLOCK_BYTES:
        return 0
    return 1 << (max(1, BLOCK_BYTES // per_token).bit_length() - 1)


def loss_workspace_bytes(
    block_tokens: int,
    vocabulary: int,
    hidden_size: int,
    bytes_per_value: int,
    *,
    fused_accumulation: bool = False,
    in_place: bool = False,
    has_entropy: bool = False,
) -> int:
    """Bytes of workspace, in addition to activations, while a pass computes a loss by blocks.

    Logits are fp32; if values are narrower, there is also a copy of them or of their gradient in that type. The weight gradient
    is summed over the blocks in fp32; if values are narrower, a block's contribution is one more tensor.

    Args:
        block_tokens: tokens of a block; 0 for no blocks, which takes no memory.
        fused_accumulation: blocks accumulate into the weight's main gradient; only a placeholder tensor is allocated.
        in_place: a kernel overwrites logits, in the type of the values, with their gradient; then there is a second copy of a
            block's input, scaled by the weights of its tokens.
        has_entropy: the loss reads entropies, for which every logit has one more factor in fp32.
    """
    if block_tokens == 0:
        return 0
    factors = FP32_BYTES * block_tokens * vocabulary if has_entropy else 0
    copy = bytes_per_value if bytes_per_value < FP32_BYTES else 0
    gradient = bytes_per_value if fused_accumulation else FP32_BYTES + copy
    if in_place:
        return factors + bytes_per_value * block_tokens * (vocabulary + hidden_size) + vocabulary * hidden_size * gradient
    return factors + vocabulary * (block_tokens * (FP32_BYTES + copy) + hidden_size * gradient)
