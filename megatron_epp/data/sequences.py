"""Sequences made of documents under a limit of positions: split into several, or truncated to one each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG_DOCUMENTS = ("split", "truncate")
"""Treatments of a document with more positions than a sequence may have: several sequences, or its beginning only."""

Index = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Every sequence of some documents, in the order of the documents and within them of their tokens.

    A document of n tokens has n - 1 positions (inputs ``[:-1]``, labels ``[1:]``); one of fewer than 2 tokens has none and
    makes no sequence. Sequence k of a document that is split has the inputs ``[k * limit, (k + 1) * limit)``, so its last label
    is the first input of sequence k + 1: the two overlap by one token, and every token but a document's first is a label once.

    Attributes:
        lengths: int32 [sequences], the positions of each, at most `limit`.
        limit: largest number of positions of a sequence.
        documents: [kept documents], their indices among all documents.
        ends: [kept documents], number of sequences up to and including the last one of each; None if each is one sequence.
        num_long: documents of more than `limit` positions.
        num_left_out: tokens of truncated documents beyond their only sequence.
    """

    lengths: NDArray[np.int32]
    limit: int
    documents: Index
    ends: Index | None
    num_long: int
    num_left_out: int

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the document of a sequence, and the index in it of the sequence's first token."""
        if self.ends is None:
            return int(self.documents[sequence]), 0
        # A number of the array's own type: with any other numpy would convert the array first.
        kept = int(np.searchsorted(self.ends, self.ends.dtype.type(sequence), side="right"))
        before = int(self.ends[kept - 1]) if kept else 0
        return int(self.documents[kept]), (sequence - before) * self.limit


def sequences_of(num_tokens: Index, limit: int, long_documents: str = "split") -> Sequences:
    """Return the sequences of documents.

    Args:
        num_tokens: [documents], tokens of each.
        limit: largest number of positions of a sequence, at least 1.
        long_documents: one of `LONG_DOCUMENTS`.
    """
    kept = num_tokens >= 2
    documents, positions = _narrow(np.flatnonzero(kept)), num_tokens[kept] - 1
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


def _narrow(rising: NDArray[np.int64]) -> Index:
    """Convert to four bytes each if values fit, which saves memory on every rank with hundreds of millions of documents."""
    return rising.astype(np.uint32) if len(rising) and rising[-1] < 2**32 else rising
