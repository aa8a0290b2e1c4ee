"""Opens a Megatron ``.bin``/``.idx`` pair after checking that the two belong together.

Layout of the index: 9 bytes magic, u64 version, u8 type code, u64 sequences, u64 document boundaries; then an int32 length and
an int64 byte offset per sequence, an int64 boundary per document plus one, and for multimodal files an int8 mode per sequence.
"""

from __future__ import annotations

import os
import struct

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path

from megatron_epp.schedule.errors import EppError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_REMAKE = "make it again with `megatron-epp prepare` or Megatron's preprocess_data.py"


def open_documents(prefix: str, mmap: bool = True) -> tuple[IndexedDataset, np.ndarray]:
    """Open the pair ``prefix.bin``, ``prefix.idx``.

    Args:
        prefix: as in ``--data-path``.
        mmap: map the ``.bin`` file instead of reading from it (``--no-mmap-bin-files`` turns it off).

    Returns:
        The indexed dataset, and the tokens of each document (int64), summed over its sentences. No token is read.

    Raises:
        EppError: a file is missing, empty, truncated, not an index, or does not match the other one.
    """
    check_pair(prefix)
    item_bytes = _check_index(f"{prefix}.idx")
    num_bytes = os.path.getsize(f"{prefix}.bin")
    if num_bytes == 0:
        raise EppError(f"{prefix}.bin is empty; {_REMAKE}")
    try:
        data = IndexedDataset(prefix, multimodal=False, mmap=mmap)
    except (AssertionError, ValueError) as error:
        raise EppError(f"{prefix}.idx contradicts itself ({str(error) or 'document boundaries'}); {_REMAKE}") from error
    return data, _document_tokens(prefix, data, item_bytes, num_bytes)


def check_pair(prefix: str) -> None:
    """Raise `EppError` unless there is a file of either kind, as in ``--data-path``."""
    if is_object_storage_path(prefix):
        raise EppError(f"{prefix} is in object storage, which is not supported; copy the .bin and .idx files to a file system")
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            raise EppError(
                f"there is no file {path}; --data-path takes prefixes of .bin/.idx pairs without the suffix, or weight and"
                " prefix in turn"
            )


def _check_index(path: str) -> int:
    """Check magic, version, type and size of an index; returns the bytes of one token."""
    num_bytes = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise EppError(f"{path} is not a Megatron index (its first bytes are {header[:9]!r}); {_REMAKE}")
    if len(header) < _HEADER.size:
        raise EppError(f"{path} is truncated: {num_bytes} bytes, not even a header of {_HEADER.size}; {_REMAKE}")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
    if version != 1 or code not in {kind.value for kind in DType}:
        raise EppError(f"{path} has index version {version} and token type {code}, which this Megatron cannot read; {_REMAKE}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if num_bytes not in (expected, expected + num_sequences):
        state = "is truncated" if num_bytes < expected else "has too much in it"
        raise EppError(f"{path} {state}: {num_bytes} bytes where its header announces {expected}; {_REMAKE}")
    if num_boundaries < 2:
        raise EppError(f"{path} holds no documents; {_REMAKE}")
    return DType.size(code)


def _document_tokens(prefix: str, data: IndexedDataset, item_bytes: int, num_bytes: int) -> np.ndarray:
    """Tokens of each document, after checking that every document is one run of the ``.bin`` file."""
    boundaries = data.document_indices
    ends = np.concatenate(([0], np.cumsum(data.sequence_lengths, dtype=np.int64)))
    if boundaries[0] != 0 or np.any(np.diff(boundaries) < 0) or np.any(data.sequence_lengths < 0):
        raise EppError(f"{prefix}.idx contradicts itself (document boundaries or lengths); {_REMAKE}")
    if not np.array_equal(data.index.sequence_pointers, ends[:-1] * item_bytes):
        raise EppError(f"{prefix}.idx has sequences that do not follow one another in the .bin file; {_REMAKE}")
    if num_bytes != ends[-1] * item_bytes:
        raise EppError(
            f"{prefix}.bin has {num_bytes} bytes but {prefix}.idx describes {ends[-1] * item_bytes}: they are not a pair or the"
            f" .bin is incomplete; {_REMAKE}"
        )
    return ends[boundaries[1:]] - ends[boundaries[:-1]]
