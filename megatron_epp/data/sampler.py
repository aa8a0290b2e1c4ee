"""Selection of the sequences of each global batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan.errors import EppError, Remedy

_AT_ONCE = 1024  # sequences whose lengths are added up at a time
_LARGE = 1 << 24
"""Sequences above which the order of an epoch is computed entry by entry. Up to here a rank holds at most 64 MB of it."""
_PART = 1 << 20  # entries that are computed at a time, since intermediate values take several times their memory
_ROUNDS = 8  # rounds of the network that permutes. Four do with random functions (Luby and Rackoff, 1988); these are hashes.


def epoch_order(num_sequences: int, *seed: int) -> np.ndarray:
    """A permutation of ``range(num_sequences)`` that depends only on the arguments, usually the user's seed and the epoch."""
    # RandomState's streams are frozen across numpy releases (the newer Generator's are not), and a resumed run must see the
    # same order under another numpy. uint32 halves the memory of orders over hundreds of millions of documents.
    order = np.arange(num_sequences, dtype=np.uint32 if num_sequences < 2**32 else np.int64)
    _random(seed).shuffle(order)
    return order


def epoch_start(count: int, num_sequences: int, *seed: int) -> np.ndarray:
    """The first entries of the order of an epoch: `epoch_order`'s, or `permuted` ones where that is large."""
    if num_sequences <= _LARGE:
        return epoch_order(num_sequences, *seed)[:count]
    parts = (np.arange(first, min(first + _PART, count)) for first in range(0, count, _PART))
    return np.concatenate([permuted(part, num_sequences, *seed) for part in parts])


def _random(seed: tuple[int, ...]) -> np.random.RandomState:
    return np.random.RandomState([part % 2**32 for part in seed])


def permuted(indices: np.ndarray, num_sequences: int, *seed: int) -> np.ndarray:
    """Return entries of a permutation of ``range(num_sequences)`` by the seed, in no memory but for these.

    A Feistel network permutes an even number of bits, again while a result is outside of the range (Black and Rogaway, 2002).
    """
    half = np.uint64(-(-(num_sequences - 1).bit_length() // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _random(seed).randint(0, 2**63, _ROUNDS, dtype=np.int64).astype(np.uint64)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        values[outside] = (left << half) | right
        outside = values >= num_sequences
    return values.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of 64-bit numbers: the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class GlobalBatchSampler(Iterator[tuple[int, ...]]):
    """Infinite iterator over the sequence indices of global batches: epochs, each shuffled or in order, one after the other.

    The whole state is `consumed_samples`, the sequences taken over all replicas (Megatron's ``consumed_train_samples``), from
    which a run resumes exactly, under any data-parallel size. Raises `EppError` for no sequences, or a batch size below 1.
    """

    def __init__(
        self, num_sequences: int, global_batch_size: int, consumed_samples: int = 0, seed: int = 1234, shuffle: bool = True
    ) -> None:
        if num_sequences < 1:
            raise EppError("there are no sequences to sample from: the dataset is empty")
        if global_batch_size < 1:
            reason = f"a global batch of {global_batch_size} sequences is too small"
            raise EppError(reason, Remedy("raise", "global_batch_size", 1))
        self.consumed_samples, self._num_sequences, self._batch_size = consumed_samples, num_sequences, global_batch_size
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __next__(self) -> tuple[int, ...]:
        parts, stop = list[int](), self.consumed_samples + self._batch_size
        while len(parts) < self._batch_size:
            start = self.consumed_samples + len(parts)
            parts += self._following(start, stop - start).tolist()
        self.consumed_samples = stop
        return tuple(parts)

    def _following(self, start: int, most: int) -> np.ndarray:
        """At most so many sequences of the global order from `start` on, up to the end of its epoch."""
        epoch, offset = divmod(start, self._num_sequences)
        stop = min(offset + most, self._num_sequences)
        if not self._shuffle:
            return np.arange(offset, stop)
        if self._num_sequences > _LARGE:
            return permuted(np.arange(offset, stop), self._num_sequences, self._seed, epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self._num_sequences, self._seed, epoch)
        return self._order[offset:stop]


class TokenBatchSampler(GlobalBatchSampler):
    """`GlobalBatchSampler` whose batches have at most `batch_tokens` positions over all replicas, but `least` sequences.

    Raises `EppError` if there are no sequences, or no `least`.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_tokens: int,
        least: int = 1,
        consumed_samples: int = 0,
        seed: int = 1234,
        shuffle: bool = True,
    ) -> None:
        super().__init__(len(lengths), least, consumed_samples, seed, shuffle)
        self._lengths, self._batch_tokens = lengths, batch_tokens

    def __next__(self) -> tuple[int, ...]:
        taken = list(super().__next__())
        num_tokens = int(self._lengths[taken].sum(dtype=np.int64))
        while True:
            following = self._following(self.consumed_samples, _AT_ONCE)
            ends = num_tokens + np.cumsum(self._lengths[following], dtype=np.int64)
            count = int(np.searchsorted(ends, self._batch_tokens, side="right"))
            taken += following[:count].tolist()
            self.consumed_samples += count
            if count < len(following):
                return tuple(taken)
            num_tokens = int(ends[-1])
