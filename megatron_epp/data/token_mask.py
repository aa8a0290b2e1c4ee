"""Mask of the trained tokens of a ``.bin``/``.idx`` pair, in a file next to it: one uint8 per token, in the same order."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.errors import EppError

MASK_SUFFIX = ".mask"
"""Suffix of the file, after the prefix of the pair."""

Mask = NDArray[np.uint8]


class TokenMask:
    """Mask of a pair: 1 for a token that is trained where it is a label, 0 for one that is not. No value is read on opening.

    Raises:
        EppError: the file has another size than one byte per token.
    """

    def __init__(self, prefix: str, num_tokens: int, mmap: bool = True) -> None:
        self.path = prefix + MASK_SUFFIX
        self._arguments = prefix, num_tokens, mmap
        num_bytes = os.path.getsize(self.path)
        if num_bytes != num_tokens:
            raise EppError(
                f"{self.path} has {num_bytes:,} bytes and {prefix}.bin has {num_tokens:,} tokens, and a mask has one byte per"
                " token: it is of another pair, or incomplete; make both again with `megatron-epp prepare`, or remove"
                " the mask to train on all tokens"
            )
        self._mapped = np.memmap(self.path, dtype=np.uint8, mode="r") if mmap else None

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenMask, self._arguments

    def read(self, start: int, end: int) -> Mask:
        """Return the mask of tokens ``[start, end)`` of the pair. Raises `EppError` if a value is neither 0 nor 1."""
        if self._mapped is not None:
            mask: Mask = self._mapped[start:end]
        else:
            mask = np.fromfile(self.path, dtype=np.uint8, count=end - start, offset=start)
        if len(mask) and mask.max() > 1:
            at = int(np.argmax(mask > 1))
            raise EppError(
                f"{self.path} has {int(mask[at])} for token {start + at:,}, where 1 (trained) or 0 (not) is expected; make it"
                " again with `megatron-epp prepare`, or remove it to train on all tokens"
            )
        return mask


def open_mask(prefix: str, num_tokens: int, mmap: bool = True) -> TokenMask | None:
    """Open the mask of a pair, as `TokenMask` does; None if there is none, and all tokens are trained."""
    return TokenMask(prefix, num_tokens, mmap) if os.path.exists(prefix + MASK_SUFFIX) else None
