"""Reader of Megatron's ``.idx`` files with numpy: tokens of each document, without Megatron and without reading tokens.

Layout: 9 bytes magic, u64 version, u8 type code, u64 sequences, u64 document boundaries; then an int32 length and an int64 byte
offset per sequence, an int64 boundary per document plus one, and for multimodal files an int8 mode per sequence.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.errors import EppError

REMAKE = "make it again with `megatron-epp prepare` or Megatron's preprocess_data.py"
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"


class Header(NamedTuple):
    """Header of an index: type code and numbers of entries."""

    type_code: int
    num_sequences: int
    num_boundaries: int


def read_header(path: str) -> Header:
    """Read a header and check the index's version and size.

    Raises:
        EppError: the file is no such index, or there are no documents.
    """
    num_bytes = os.path.getsize(path)
    with open(path, "rb") as stream:
        raw = stream.read(_HEADER.size)
    if not raw.startswith(_MAGIC):
        raise EppError(f"{path} is not a Megatron index (its first bytes are {raw[: len(_MAGIC)]!r}); {REMAKE}")
    if len(raw) < _HEADER.size:
        raise EppError(f"{path} is truncated: {num_bytes} bytes, not even a header of {_HEADER.size}; {REMAKE}")
    _, version, *numbers = _HEADER.unpack(raw)
    header = Header(*numbers)
    if version != 1:
        raise EppError(f"{path} has index version {version}, which cannot be read; {REMAKE}")
    expected = _HEADER.size + 12 * header.num_sequences + 8 * header.num_boundaries
    if num_bytes not in (expected, expected + header.num_sequences):
        state = "is truncated" if num_bytes < expected else "has too much in it"
        raise EppError(f"{path} {state}: {num_bytes} bytes where its header announces {expected}; {REMAKE}")
    if header.num_boundaries < 2:
        raise EppError(f"{path} holds no documents; {REMAKE}")
    return header


def document_tokens(path: str) -> NDArray[np.int64]:
    """Tokens of each document of an index, summed over its sentences.

    Raises:
        EppError: the index is damaged.
    """
    header, raw = read_header(path), np.memmap(path, mode="r")
    lengths = np.frombuffer(raw, np.int32, header.num_sequences, _HEADER.size)
    boundaries = np.frombuffer(raw, np.int64, header.num_boundaries, _HEADER.size + 12 * header.num_sequences)
    return np.diff(sequence_ends(path, lengths, boundaries)[boundaries])


def sequence_ends(path: str, lengths: NDArray[np.int32], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of tokens before each boundary between sequences, the first and the last included.

    Args:
        path: of the index, for errors.
        lengths: tokens of each sequence.
        boundaries: number of sequences before each document, and of all sequences.

    Raises:
        EppError: lengths and boundaries are inconsistent.
    """
    rises = boundaries[0] == 0 and boundaries[-1] == len(lengths) and not np.any(np.diff(boundaries) < 0)
    if not rises or np.any(lengths < 0):
        raise EppError(f"{path} contradicts itself (document boundaries or lengths); {REMAKE}")
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
