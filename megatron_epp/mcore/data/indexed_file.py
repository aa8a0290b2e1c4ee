"""Opening of a Megatron ``.bin``/``.idx`` pair, with a check that the two files belong together."""

from __future__ import annotations

import os

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path

from megatron_epp.data.documents import REMAKE, read_header, sequence_ends
from megatron_epp.plan.errors import EppError


def open_documents(prefix: str, mmap: bool = True) -> tuple[IndexedDataset, np.ndarray]:
    """Open the pair ``prefix.bin``, ``prefix.idx``.

    Args:
        prefix: path without suffix, as in ``--data-path``.
        mmap: map the ``.bin`` file instead of reading from it (``--no-mmap-bin-files`` turns it off).

    Returns:
        The indexed dataset, and the tokens of each document (int64), summed over its sentences. No token is read.

    Raises:
        EppError: a file is missing, empty, truncated, not an index, or does not match the other one.
    """
    check_pair(prefix)
    item_bytes = _item_bytes(f"{prefix}.idx")
    num_bytes = os.path.getsize(f"{prefix}.bin")
    if num_bytes == 0:
        raise EppError(f"{prefix}.bin is empty; {REMAKE}")
    try:
        data = IndexedDataset(prefix, multimodal=False, mmap=mmap)
    except (AssertionError, ValueError) as error:
        raise EppError(f"{prefix}.idx contradicts itself ({str(error) or 'document boundaries'}); {REMAKE}") from error
    return data, _document_tokens(prefix, data, item_bytes, num_bytes)


def check_pair(prefix: str) -> None:
    """Raise `EppError` unless both files of a prefix exist and are not in object storage."""
    if is_object_storage_path(prefix):
        raise EppError(f"{prefix} is in object storage, which is not supported; copy the .bin and .idx files to a file system")
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            raise EppError(
                f"there is no file {path}; --data-path takes prefixes of .bin/.idx pairs without the suffix, or weight and"
                " prefix in turn"
            )


def _item_bytes(path: str) -> int:
    """Return the bytes of one token, from the header of an ``.idx`` file."""
    code = read_header(path).type_code
    if code not in {kind.value for kind in DType}:
        raise EppError(f"{path} has token type {code}, which this Megatron cannot read; {REMAKE}")
    return DType.size(code)


def _document_tokens(prefix: str, data: IndexedDataset, item_bytes: int, num_bytes: int) -> np.ndarray:
    """Return the tokens of each document, after a check that every document is contiguous in the ``.bin`` file."""
    boundaries = data.document_indices
    ends = sequence_ends(f"{prefix}.idx", data.sequence_lengths, boundaries)
    if not np.array_equal(data.index.sequence_pointers, ends[:-1] * item_bytes):
        raise EppError(f"{prefix}.idx has sequences that do not follow one another in the .bin file; {REMAKE}")
    if num_bytes != ends[-1] * item_bytes:
        raise EppError(
            f"{prefix}.bin has {num_bytes} bytes but {prefix}.idx describes {ends[-1] * item_bytes}: they are not a pair or the"
            f" .bin is incomplete; {REMAKE}"
        )
    return np.diff(ends[boundaries])
