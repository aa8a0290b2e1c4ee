"""Sizes that repeat: buffers of slightly different length take the same memory, so that what one leaves fits the next.

Lengths change with every batch. Where each buffer is as long as its sequence, none of the gaps that an iteration leaves fits
the next one's buffers, and an allocator that cuts memory into pieces ends up with many it cannot use. What is rounded up is
rounded in plans and at run time alike, so that plans promise what runs take.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STEPS = 8
"""Sizes between a power of two and the next: at most an eighth of a buffer lies idle."""


def size_class(count: int) -> int:
    """The size a buffer for so many tokens has: the next of the sizes there are."""
    return int(size_classes(np.asarray(count, dtype=np.int64)))


def size_classes(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """As `size_class`, for many."""
    _, digits = np.frexp(counts)
    step = np.left_shift(np.int64(1), np.maximum(digits.astype(np.int64) - STEPS.bit_length(), 0))
    return -(-counts // step) * step
