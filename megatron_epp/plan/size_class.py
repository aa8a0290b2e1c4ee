"""Size classes: buffers of slightly different length take the same memory, so that the memory freed by one fits the next.

Lengths change with every batch. If each buffer were as long as its sequence, the gaps that an iteration leaves would not fit
the next one's buffers, and an allocator that splits memory into blocks would end up with many unusable ones. Sizes are rounded
up in the same way in plans and at run time, so that plans predict the memory that runs take.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STEPS = 8
"""Number of sizes between a power of two and the next, so that at most an eighth of a buffer is unused."""


def size_class(count: int) -> int:
    """Tokens of the buffer for a number of tokens: the next size class."""
    return int(size_classes(np.asarray(count, dtype=np.int64)))


def size_classes(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Vectorized `size_class`."""
    _, digits = np.frexp(counts)
    step = np.left_shift(np.int64(1), np.maximum(digits.astype(np.int64) - STEPS.bit_length(), 0))
    return -(-counts // step) * step
