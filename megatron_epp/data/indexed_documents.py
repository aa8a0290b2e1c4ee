"""Documents of Megatron's ``.bin``/``.idx`` pairs: the index, read with numpy, the sequences made of them under a limit of
positions, and the mask of the trained tokens, in a file next to the pair: one uint8 per token, in the same order.

Layout of an index: 9 bytes magic, u64 version, u8 type code, u64 sequences, u64 document boundaries; then an int32 length and
an int64 byte offset per sequence, an int64 boundary per document plus one, and for multimodal files an int8 mode per sequence.
Trained tokens are counted of documents, also of what truncation leaves of them, and of a batch's sequences, for plans.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.problem import TrainedParts

if TYPE_CHECKING:  # which needs torch
    from megatron_epp.data.batch import SequenceDataset

REMAKE = "make it again with `megatron-epp prepare` or Megatron's preprocess_data.py"  # remedy for an index that cannot be read
LONG_DOCUMENTS = ("split", "truncate")
"""Treatments of a document with more positions than a sequence may have: several sequences, or its beginning only."""
DOCUMENTS = (*LONG_DOCUMENTS, "stream")
"""Ways to make samples of documents: sequences by themselves, or a stream of all, cut into samples of one length."""
MASK_SUFFIX = ".mask"  # suffix of the file, after the prefix of the pair
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"

Index = NDArray[np.integer[Any]]
Mask = NDArray[np.uint8]
PARTS = 16  # most parts of a sequence that are counted by themselves, since an answer may be in its last slices only
_BLOCK_TOKENS = 1 << 20  # tokens of documents whose mask is read at once, unless one document has more


class Header(NamedTuple):
    type_code: int
    num_sequences: int
    num_boundaries: int


def read_header(path: str) -> Header:
    num_bytes = os.path.getsize(path)
    with open(path, "rb") as stream:
        raw = stream.read(_HEADER.size)
    if not raw:
        raise EppError(f"{path} is empty; {REMAKE}")
    if not raw.startswith(_MAGIC):
        raise EppError(f"{path} is not a Megatron index (its first bytes are {raw[: len(_MAGIC)]!r}); {REMAKE}")
    if len(raw) < _HEADER.size:
        raise EppError(f"{path} is truncated: {num_bytes} bytes, less than a header of {_HEADER.size}; {REMAKE}")
    _, version, *numbers = _HEADER.unpack(raw)
    header = Header(*numbers)
    if version != 1:
        raise EppError(f"{path} has index version {version}, which cannot be read; {REMAKE}")
    expected = _HEADER.size + 12 * header.num_sequences + 8 * header.num_boundaries
    if num_bytes not in (expected, expected + header.num_sequences):
        state = "is truncated" if num_bytes < expected else "is too long"
        raise EppError(f"{path} {state}: {num_bytes} bytes where its header announces {expected}; {REMAKE}")
    if header.num_boundaries < 2:
        raise EppError(f"{path} holds no documents; {REMAKE}")
    return header


def document_tokens(path: str) -> NDArray[np.int64]:
    """Tokens of each document of an index, summed over its sentences. Raises `EppError` if the index is damaged."""
    header, raw = read_header(path), np.memmap(path, mode="r")
    lengths = np.frombuffer(raw, np.int32, header.num_sequences, _HEADER.size)
    boundaries = np.frombuffer(raw, np.int64, header.num_boundaries, _HEADER.size + 12 * header.num_sequences)
    return np.diff(sequence_ends(path, lengths, boundaries)[boundaries])


def sequence_ends(path: str, lengths: NDArray[np.int32], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of tokens before each boundary of sequences, and of all. Raises `EppError` if documents contradict them."""
    fault, last = "", boundaries[-1]
    if len(negative := np.flatnonzero(lengths < 0)):
        fault = f"sequence {negative[0]} has {lengths[negative[0]]} tokens"
    elif len(falls := np.flatnonzero(boundaries[1:] < boundaries[:-1])):
        start, end = boundaries[falls[0] : falls[0] + 2]
        fault = f"document {falls[0]} begins at sequence {start} and ends before sequence {end}"
    elif boundaries[0] != 0:
        fault = f"document 0 begins at sequence {boundaries[0]}"
    elif last != len(lengths):
        fault = f"document {len(boundaries) - 2} ends before sequence {last}, and there are {len(lengths)} sequences"
    if fault:
        raise EppError(f"{path} contradicts itself: {fault}; {REMAKE}")
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class Sequences:
    """All sequences of some documents, in the order of the documents and of their tokens.

    A document of n tokens has n - 1 positions (inputs ``[:-1]``, labels ``[1:]``); one of fewer than 2 tokens has none and
    makes no sequence. Sequence k of a document that is split has the inputs ``[k * limit, (k + 1) * limit)``, so its last label
    is the first input of sequence k + 1: the two overlap by one token, and every token but a document's first is a label once.
    """

    lengths: NDArray[np.int32]  # int32 [sequences], the positions of each, at most `limit`
    limit: int
    documents: Index | None  # [kept documents], their indices among all documents; None if all are kept
    # [kept documents], number of sequences up to and including the last one of each; None if each is one sequence
    ends: Index | None
    num_long: int  # documents of more than `limit` positions
    num_left_out: int  # tokens of truncated documents beyond their only sequence

    def __len__(self) -> int:
        return len(self.lengths)

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the document of a sequence, and the index in it of the sequence's first token."""
        number, first = sequence, 0
        if self.ends is not None:
            # A number of the array's own type: with any other numpy would convert the array first.
            number = int(np.searchsorted(self.ends, self.ends.dtype.type(sequence), side="right"))
            first = (sequence - (int(self.ends[number - 1]) if number else 0)) * self.limit
        return number if self.documents is None else int(self.documents[number]), first


def cut_documents(num_tokens: Index, limit: int, long_documents: str = "split") -> Sequences:
    """Return the sequences of documents of so many tokens, at most `limit` positions each; long ones as in `LONG_DOCUMENTS`."""
    trains = num_tokens >= 2
    documents, positions = None, num_tokens - 1
    if not trains.all():
        documents, positions = _narrow(np.flatnonzero(trains)), positions[trains]
    num_long = int(np.count_nonzero(positions > limit))
    if long_documents == "truncate" or not num_long:
        lengths = np.minimum(positions, limit).astype(np.int32)
        left_out = int(positions.sum(dtype=np.int64)) - int(lengths.sum(dtype=np.int64))
        return Sequences(lengths, limit, documents, None, num_long, left_out)
    pieces = -(-positions // limit)
    ends = np.cumsum(pieces, dtype=np.int64)
    lengths = np.full(ends[-1], limit, dtype=np.int32)
    lengths[ends - 1] = positions - (pieces - 1) * limit
    return Sequences(lengths, limit, documents, _narrow(ends), num_long, 0)


def stream_lengths(num_tokens: Index, limit: int) -> NDArray[np.int32]:
    """Return the positions of a stream's samples, all `limit`, the rest left out. Raises `EppError` if there is no sample."""
    total = int(num_tokens.sum(dtype=np.int64))
    if total <= limit:
        raise EppError(f"{total:,} tokens of all documents are less than a sample of {limit:,} and its last label")
    return np.full((total - 1) // limit, limit, dtype=np.int32)


def _narrow(rising: NDArray[np.int64]) -> Index:
    """Convert to four bytes each if values fit, which saves memory on every rank with hundreds of millions of documents."""
    return rising.astype(np.uint32) if len(rising) and rising[-1] < 2**32 else rising


class TokenMask:
    """Mask of a pair, 1 for a token trained where it is a label. Raises `EppError` unless the file has a byte per token."""

    def __init__(self, prefix: str, num_tokens: int, mmap: bool = True) -> None:
        self.path = prefix + MASK_SUFFIX
        self._arguments = prefix, num_tokens, mmap
        num_bytes = os.path.getsize(self.path)
        if num_bytes != num_tokens:
            has = f"{num_bytes:,} bytes and {prefix}.bin has {num_tokens:,} tokens, and a mask has one byte per token"
            todo = "make both again with `megatron-epp prepare`, or remove the mask to train on all tokens"
            raise EppError(f"{self.path} has {has}: it is of another pair, or incomplete; {todo}")
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
            what = f"{self.path} has {int(mask[at])} for token {start + at:,}, where 1 (trained) or 0 (not) is expected"
            raise EppError(f"{what}; make it again with `megatron-epp prepare`, or remove it to train on all tokens")
        return mask


def open_mask(prefix: str, num_tokens: int, mmap: bool = True) -> TokenMask | None:
    """Open the mask of a pair; None if there is none, and all tokens are trained."""
    return TokenMask(prefix, num_tokens, mmap) if os.path.exists(prefix + MASK_SUFFIX) else None


class TrainedLabels(NamedTuple):
    """Numbers of trained labels of some documents: all, and the part that truncation removes."""

    total: int
    cut: int


def trained_labels(
    read: Callable[[int, int], Mask], first: int, num_tokens: Index, limit: int | None = None
) -> Iterator[TrainedLabels]:
    """Yield trained labels of documents, of tokens behind `first`, cut to `limit` positions, by blocks of masks."""
    ends, document = np.cumsum(num_tokens, dtype=np.int64), 0
    while document < len(ends):
        start = int(ends[document - 1]) if document else 0
        after = max(document + 1, int(np.searchsorted(ends, start + _BLOCK_TOKENS, side="right")))
        mask = read(first + start, first + int(ends[after - 1]))
        lengths = num_tokens[document:after]
        begins = ends[document:after] - lengths - start
        total = int(mask.sum(dtype=np.int64)) - int(mask[begins[lengths > 0]].sum(dtype=np.int64))
        long = np.flatnonzero(lengths > limit + 1) if limit is not None else ()
        cut = sum(int(mask[begins[at] + limit + 1 : begins[at] + lengths[at]].sum(dtype=np.int64)) for at in long)
        yield TrainedLabels(total, cut)
        document = after


def any_trained(dataset: SequenceDataset, indices: Sequence[int]) -> bool:
    """Return True if some token of sequences is trained; their masks are read up to the first that has one."""
    masks = (dataset.trained(index, 1, int(dataset.lengths[index]) + 1) for index in indices)
    return any(mask is None or mask.any() for mask in masks)


def trained_parts(dataset: SequenceDataset, indices: Sequence[int]) -> tuple[TrainedParts, ...]:
    """Return the trained tokens of sequences, each in equal parts; empty if all their tokens are trained."""
    counts = tuple(_counted(dataset, index) for index in indices)
    return counts if sum(map(sum, counts)) < sum(int(dataset.lengths[index]) for index in indices) else ()


def _counted(dataset: SequenceDataset, index: int) -> TrainedParts:
    length = int(dataset.lengths[index])
    mask = dataset.trained(index, 1, length + 1)
    if mask is None:
        return (length,)
    count = min(PARTS, length)
    edges = [length * part // count for part in range(count + 1)]
    return tuple(int(mask[start:end].sum(dtype=np.int64)) for start, end in pairwise(edges))
