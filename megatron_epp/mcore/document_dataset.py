"""Datasets in which one document is one sequence, over Megatron's ``.bin``/``.idx`` files."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.utils import log_single_rank

from megatron_epp.data.batch import SequenceDataset
from megatron_epp.data.sampler import epoch_order
from megatron_epp.mcore.indexed_file import open_documents
from megatron_epp.schedule.errors import EppError

logger = logging.getLogger(__name__)


class DocumentFile:
    """One ``.bin``/``.idx`` pair, opened and checked once, from which several splits are taken.

    Attributes:
        prefix: as in ``--data-path``.
        data: Megatron's indexed dataset.
        num_tokens: of each document, int64.
    """

    def __init__(self, prefix: str, mmap: bool = True) -> None:
        self.prefix = prefix
        self.data: IndexedDataset
        self.num_tokens: np.ndarray
        self.data, self.num_tokens = open_documents(prefix, mmap)

    def __len__(self) -> int:
        return len(self.num_tokens)


class DocumentDataset:
    """The documents ``[first, last)`` of one file, in file order. Implements `SequenceDataset`.

    A document of n tokens trains n - 1 positions (inputs ``[:-1]``, labels ``[1:]``), at most `context_limit` of them: longer
    documents are cut there. Documents of fewer than 2 tokens train nothing; they are skipped, counted and logged.

    Args:
        file: the opened pair, or its prefix.
        context_limit: the most positions of a sequence (``--seq-length``).
        first, last: document range; all by default.
        name: of the split, for the log.

    Attributes:
        lengths: int32, positions of each kept document.
        num_skipped, num_truncated: documents.

    Raises:
        EppError: see `open_documents`; or no document has 2 tokens.
    """

    def __init__(
        self, file: DocumentFile | str, context_limit: int, first: int = 0, last: int | None = None, name: str = "train"
    ) -> None:
        self.file = DocumentFile(file) if isinstance(file, str) else file
        num_tokens = self.file.num_tokens[first:last]
        kept = num_tokens >= 2
        self._documents = first + np.flatnonzero(kept)
        self.lengths = np.minimum(num_tokens[kept] - 1, context_limit).astype(np.int32)
        self.num_skipped = len(num_tokens) - len(self.lengths)
        self.num_truncated = int(np.count_nonzero(num_tokens > context_limit + 1))
        if not len(self.lengths):
            raise EppError(
                f"all {len(num_tokens)} {name} documents of {self.file.prefix} have fewer than 2 tokens, so there is nothing to"
                " predict; check how the file was made, or the --split"
            )
        log_single_rank(
            logger,
            logging.INFO,
            f"{name} {self.file.prefix}: {len(self)} documents, {self.num_skipped} skipped (fewer than 2 tokens),"
            f" {self.num_truncated} truncated to --seq-length {context_limit}; positions min {self.lengths.min()},"
            f" median {int(np.median(self.lengths))}, max {self.lengths.max()}, sum {self.lengths.sum(dtype=np.int64)}",
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Tokens ``[start, end)`` of the ``lengths[index] + 1`` that a document keeps, in the file's integer type.

        With a mapped file this is a view: nothing is read before it is used.
        """
        end = int(self.lengths[index]) + 1 if end is None else end
        # A document's sentences lie one after the other in the file, so reading on past the first one is a read of them all.
        sentence = int(self.file.data.document_indices[self._documents[index]])
        return self.file.data.get(sentence, offset=start, length=end - start)


class DocumentBlend:
    """Sequences drawn from several datasets. Implements `SequenceDataset`.

    Args:
        sources: the datasets.
        source_of: for each sequence of the blend, its dataset.
        index_of: for each sequence of the blend, its index there.
    """

    def __init__(self, sources: Sequence[SequenceDataset], source_of: np.ndarray, index_of: np.ndarray) -> None:
        self._sources = sources
        self._source_of = source_of
        self._index_of = index_of
        self.lengths = np.empty(len(source_of), dtype=np.int32)
        for number, source in enumerate(sources):
            mine = source_of == number
            self.lengths[mine] = source.lengths[index_of[mine]]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        return self._sources[self._source_of[index]].tokens(int(self._index_of[index]), start, end)


def concatenate(sources: Sequence[SequenceDataset]) -> DocumentBlend:
    """Every sequence of every source once, source after source (a ``--data-path`` of prefixes without weights)."""
    source_of = np.repeat(np.arange(len(sources), dtype=np.int16), [len(source) for source in sources])
    return DocumentBlend(sources, source_of, np.concatenate([np.arange(len(source)) for source in sources]))


def weighted(sources: Sequence[SequenceDataset], weights: Sequence[float], num_samples: int, seed: int) -> DocumentBlend:
    """A sequence of draws in which every source has its share at every point, to be taken in order and not shuffled again.

    The order of the sources is Megatron's. Each source is shuffled by itself and starts over when it is used up, so small
    sources repeat. A longer blend starts with the shorter one, so a run can be resumed with more iterations.

    Args:
        sources: the datasets.
        weights: of documents, not of tokens, as Megatron's are of samples; need not sum to 1.
        num_samples: draws.
        seed: of the shuffles.
    """
    # Here and not at the top: in a clone of Megatron-LM these helpers are compiled only when training starts.
    from megatron.core.datasets import helpers

    shares = np.asarray(weights, dtype=np.float64)
    if np.any(shares < 0) or not 0 < shares.sum() < np.inf:
        raise EppError(f"the weights {list(weights)} of --data-path must be finite, not negative, and not all 0")
    source_of = np.zeros(num_samples, dtype=np.int16)
    index_of = np.zeros(num_samples, dtype=np.int64)
    helpers.build_blending_indices(source_of, index_of, shares / shares.sum(), len(sources), num_samples, False)
    for number, source in enumerate(sources):
        mine = source_of == number
        num_epochs = -(-int(np.count_nonzero(mine)) // len(source))
        order = [epoch_order(len(source), seed, epoch, number) for epoch in range(num_epochs)]
        if order:
            # The helper has counted each source's draws; draw number n of a source is entry n of its epochs.
            index_of[mine] = np.concatenate(order)[index_of[mine]]
    return DocumentBlend(sources, source_of, index_of)
