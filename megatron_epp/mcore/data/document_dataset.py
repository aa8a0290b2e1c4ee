"""Megatron's ``.bin``/``.idx`` pairs, opened and checked, and datasets in which a document is one sequence, or several."""

from __future__ import annotations

import functools
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.utils import log_single_rank

from megatron_epp.data import indexed_documents
from megatron_epp.data.batch import SequenceDataset
from megatron_epp.data.indexed_documents import MASK_SUFFIX, REMAKE, document_tokens
from megatron_epp.data.sampler import epoch_start
from megatron_epp.data.token_record import SUFFIX, Tokenizer, check_ids, check_tokenizer, load_record
from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)
_log = functools.partial(log_single_rank, logger, logging.INFO)
_warn = functools.partial(log_single_rank, logger, logging.WARNING)

_SAMPLED_DOCUMENTS, _SAMPLED_TOKENS = 16, 4096
"""Number of documents, evenly spaced, that are sampled in a file without a record or in a mask, and number of tokens of each.

Every token and every value of a mask is checked again when it is used; the sample finds most mistakes earlier.
"""
_MANY = 0.1  # share of documents that are split above which a warning says so: it is then rarely meant


class DocumentFile:
    """One ``.bin``/``.idx`` pair, opened and checked once, mapped with `mmap`; no token is read.

    `num_tokens` of documents are int32 or int64; `mask` is None without a file. Raises `EppError` unless all files fit
    together.
    """

    def __init__(self, prefix: str, mmap: bool = True) -> None:
        self.prefix = prefix
        check_pair(prefix)
        item_bytes, num_bytes = _item_bytes(f"{prefix}.idx"), os.path.getsize(f"{prefix}.bin")
        if num_bytes == 0:
            raise EppError(f"{prefix}.bin is empty; {REMAKE}")
        try:
            self.data = IndexedDataset(prefix, multimodal=False, mmap=mmap)
        except (AssertionError, ValueError) as error:
            document_tokens(f"{prefix}.idx")  # names the sequence or document that is wrong
            raise EppError(f"{prefix}.idx contradicts itself ({str(error) or 'document boundaries'}); {REMAKE}") from error
        self.num_tokens: np.ndarray = _document_tokens(prefix, self.data, item_bytes, num_bytes)
        self._item_bytes = item_bytes
        self.mask = indexed_documents.open_mask(prefix, self.total_tokens, mmap)

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum(dtype=np.int64))

    def first_token(self, document: int) -> int:
        """Return the position in the file of the first token of a document, which must have tokens."""
        sentence = self.data.document_indices[document]
        return int(self.data.index.sequence_pointers[sentence]) // self._item_bytes

    def sampled_documents(self) -> list[int]:
        """Return the indices of `_SAMPLED_DOCUMENTS` documents with tokens, evenly spaced, or of fewer."""
        sampled = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_DOCUMENTS, dtype=np.int64))
        return sampled[self.num_tokens[sampled] > 0].tolist()


def check_pair(prefix: str) -> None:
    """Raise `EppError` unless both files of a prefix exist and are not in object storage."""
    if is_object_storage_path(prefix):
        raise EppError(f"{prefix} is in object storage, which is not supported; copy the .bin and .idx files to a file system")
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            takes = "--data-path takes prefixes of .bin/.idx pairs without the suffix, or weight and prefix in turn"
            raise EppError(f"there is no file {path}; {takes}")


def check_mask_size(prefix: str) -> None:
    """Raise `EppError` if a prefix has a mask of another number of tokens than its ``.bin`` file. No token is read."""
    if os.path.exists(prefix + MASK_SUFFIX):
        indexed_documents.open_mask(prefix, os.path.getsize(f"{prefix}.bin") // _item_bytes(f"{prefix}.idx"))


def refuse_mask(prefix: str) -> None:
    """Raise `EppError` if a prefix has a mask, which samples of a stream do not use, as in Megatron."""
    if os.path.exists(prefix + MASK_SUFFIX):
        todo = "use --epp-documents split, or remove the mask to train on all tokens"
        why = "is not used by --epp-documents stream, whose samples are Megatron's own"
        raise EppError(f"{prefix}{MASK_SUFFIX} {why}: {todo}")


def _item_bytes(path: str) -> int:
    code = indexed_documents.read_header(path).type_code
    if code not in {kind.value for kind in DType}:
        raise EppError(f"{path} has token type {code}, which this Megatron cannot read; {REMAKE}")
    if not np.issubdtype(DType.dtype_from_code(code), np.integer):
        raise EppError(f"{path} has token type {code}, whose tokens are no integers; {REMAKE}")
    return DType.size(code)


def _document_tokens(prefix: str, data: IndexedDataset, item_bytes: int, num_bytes: int) -> np.ndarray:
    """Return the tokens of each document, after a check that every document is contiguous in the ``.bin`` file."""
    boundaries = data.document_indices
    ends = indexed_documents.sequence_ends(f"{prefix}.idx", data.sequence_lengths, boundaries)
    if len(wrong := np.flatnonzero(data.index.sequence_pointers != ends[:-1] * item_bytes)):
        begins, end = data.index.sequence_pointers[wrong[0]], ends[wrong[0]] * item_bytes
        why = f"sequence {wrong[0]} begins at byte {begins}, and those before it end at {end}"
        raise EppError(f"{prefix}.idx has sequences that do not follow one another in the .bin file: {why}; {REMAKE}")
    if num_bytes != (described := ends[-1] * item_bytes):
        why = f"{prefix}.bin has {num_bytes} bytes but {prefix}.idx describes {described}"
        raise EppError(f"{why}: they are not a pair or the .bin is incomplete; {REMAKE}")
    # A view of the file where every document is one sequence: ranks of a node share its pages.
    return data.sequence_lengths if (np.diff(boundaries) == 1).all() else np.diff(ends[boundaries])


def check_tokens(file: DocumentFile, run: Tokenizer, *, masks_eod: bool = False) -> None:
    """Raise `EppError` if tokens of a file are of another tokenizer than the run's, or without record not in the vocabulary."""
    record = load_record(file.prefix)
    if record is not None and (record.num_documents, record.num_tokens) != (len(file), file.total_tokens):
        own = f"the pair has {len(file):,} with {file.total_tokens:,}: it is of another pair, and is not gone by"
        of_record = f"{record.num_documents:,} documents with {record.num_tokens:,} tokens"
        _warn(f"{file.prefix}{SUFFIX} is of {of_record}, and {own}")
        record = None
    if record is not None:
        check_tokenizer(file.prefix, record, run, masks_eod=masks_eod)
        return
    what = f"{file.prefix} has no record of its tokenizer ({SUFFIX}, as `megatron-epp prepare` writes it)"
    _log(f"{what}: its tokens are taken to be made with this run's, {run}")
    for document in file.sampled_documents():
        length = min(_SAMPLED_TOKENS, int(file.num_tokens[document]))
        ids = file.data.get(int(file.data.document_indices[document]), offset=0, length=length)
        check_ids(file.prefix, ids, run.vocab_size, file.first_token(document))


def check_mask(file: DocumentFile) -> None:
    """Log that a file has a mask, and check a sample of it. Raises `EppError` for values other than 0 and 1."""
    if file.mask is None:
        return
    _log(f"{file.prefix}{MASK_SUFFIX}: only tokens that this mask marks with 1 count in the loss, as labels")
    for document in file.sampled_documents():
        first = file.first_token(document)
        file.mask.read(first, first + min(_SAMPLED_TOKENS, int(file.num_tokens[document])))


class DocumentDataset:
    """Documents ``[first, last)`` of one file as sequences of `context_limit` positions at most. Implements `SequenceDataset`.

    Those of fewer than 2 tokens are skipped; longer ones are `long_documents`: ``split`` or ``truncate``. Raises `EppError` as
    `DocumentFile` does, if none has 2 tokens, or a token that is read is not below `vocab_size`.
    """

    def __init__(
        self,
        file: DocumentFile | str,
        context_limit: int,
        first: int = 0,
        last: int | None = None,
        name: str = "train",
        *,
        long_documents: str = "split",
        vocab_size: int | None = None,
    ) -> None:
        self.file = DocumentFile(file) if isinstance(file, str) else file
        self._first, self._vocab_size = first, vocab_size
        self._num_tokens = num_tokens = self.file.num_tokens[first:last]
        self._sequences = indexed_documents.cut_documents(num_tokens, context_limit, long_documents)
        self.lengths = self._sequences.lengths
        documents = self._sequences.documents
        self.num_skipped = 0 if documents is None else len(num_tokens) - len(documents)
        self.num_long, self.num_left_out = self._sequences.num_long, self._sequences.num_left_out
        if not len(self.lengths):
            what = f"all {len(num_tokens)} {name} documents of {self.file.prefix} have fewer than 2 tokens"
            raise EppError(f"{what}, so there is nothing to predict; check how the file was made, or the --split")
        self._tell(name, long_documents, num_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Return tokens ``[start, end)`` of the ``lengths[index] + 1`` of a sequence, in the file's type; a view where mapped.

        Raises `EppError` for a token that is not in the vocabulary.
        """
        end = int(self.lengths[index]) + 1 if end is None else end
        document, before = self._sequences.locate(index)
        # A document's sentences lie one after the other in the file, so reading on past the first one is a read of them all.
        sentence = int(self.file.data.document_indices[self._first + document])
        tokens: np.ndarray = self.file.data.get(sentence, offset=before + start, length=end - start)
        if self._vocab_size is not None:
            check_ids(
                self.file.prefix, tokens, self._vocab_size, self.file.first_token(self._first + document) + before + start
            )
        return tokens

    def trained(self, index: int, start: int, end: int) -> np.ndarray | None:
        """Return the mask of tokens ``[start, end)``; None without one. Raises `EppError` for values but 0 and 1."""
        if self.file.mask is None:
            return None
        document, before = self._sequences.locate(index)
        first = self.file.first_token(self._first + document) + before
        return self.file.mask.read(first + start, first + end)

    @property
    def trains(self) -> bool:
        """True if a token of some sequence is trained; the mask is read up to the first one."""
        return self.file.mask is None or any(labels.total > labels.cut for labels in self._labels())

    def trained_labels(self) -> indexed_documents.TrainedLabels:
        """Count the trained labels of a file with a mask, of all its documents and beyond what truncation leaves of them."""
        totals, cuts = zip(*self._labels(), strict=True)
        return indexed_documents.TrainedLabels(sum(totals), sum(cuts))

    def untrained(self) -> str:
        mask, total = f"{self.file.prefix}{MASK_SUFFIX}", self.trained_labels().total
        limit, count = self._sequences.limit, len(self._num_tokens)
        if not total:
            todo = "make it again with `megatron-epp prepare --chat` (see --train-on), or remove it to train on all tokens"
            return f"{mask} marks no label of {count:,} documents: {todo}"
        marks = f"{mask} marks {total:,} labels of {count:,} documents, and --epp-documents truncate cuts all of them off"
        cut = f"the {self.num_left_out:,} tokens that {self.num_long:,} documents have beyond --seq-length {limit:,}"
        return f"{marks} with {cut}: raise it, or use --epp-documents split"

    def _labels(self) -> Iterator[indexed_documents.TrainedLabels]:
        assert self.file.mask is not None
        before = int(self.file.num_tokens[: self._first].sum(dtype=np.int64))
        limit = self._sequences.limit if self.num_left_out else None
        return indexed_documents.trained_labels(self.file.mask.read, before, self._num_tokens, limit)

    def _tell(self, name: str, long_documents: str, num_tokens: np.ndarray) -> None:
        """Log the numbers of documents and sequences; warn of tokens left out by truncation, and of many split documents."""
        limit, become = self._sequences.limit, "split" if long_documents == "split" else "truncated"
        _log(
            f"{name} {self.file.prefix}: {len(num_tokens) - self.num_skipped} documents are {len(self)} sequences,"
            f" {self.num_skipped} skipped (fewer than 2 tokens), {self.num_long} longer than --seq-length {limit} {become};"
            f" positions min {self.lengths.min()}, median {int(np.median(self.lengths))}, max {self.lengths.max()},"
            f" sum {self.lengths.sum(dtype=np.int64)}"
        )
        total = int(num_tokens.sum(dtype=np.int64))
        if long_documents == "split" and self.num_long > _MANY * len(num_tokens):
            longer = f"{self.num_long:,} of {len(num_tokens):,} documents are longer than --seq-length {limit:,}"
            what = "become several sequences, which do not attend to each other"
            whole = f"--seq-length {int(num_tokens.max()) - 1:,} would keep all whole"
            _warn(f"{name} {self.file.prefix}: {longer} and {what}; {whole}")
        if self.num_left_out:
            left = f"{self.num_left_out:,} of {total:,} tokens ({self.num_left_out / total:.1%})"
            beyond = f"what {self.num_long:,} documents have beyond --seq-length {limit:,}; --epp-documents split trains on all"
            _warn(f"{name} {self.file.prefix}: --epp-documents truncate leaves out {left}, {beyond}")
            if self.file.mask is None or (dist.is_initialized() and dist.get_rank()):
                return
            labels = self.trained_labels()  # counted on the first rank alone
            if not labels.cut:
                return
            cut = f"{labels.cut:,} of {labels.total:,} trained tokens ({100 * labels.cut / labels.total:.1f}%)"
            todo = f"raise --seq-length {self._sequences.limit:,}, or use --epp-documents split"
            logger.warning("%s %s: --epp-documents truncate leaves out %s: %s", name, self.file.prefix, cut, todo)


class DocumentBlend:
    """A `SequenceDataset` of several: `numbers` of drawn sequences, one dataset after another; None for each once."""

    def __init__(self, sources: Sequence[SequenceDataset], numbers: np.ndarray | None = None) -> None:
        self._sources, self._numbers = sources, numbers
        self._starts = [0, *accumulate(map(len, sources))]
        lengths = np.concatenate([source.lengths for source in sources])
        self.lengths: np.ndarray = lengths if numbers is None else lengths[numbers]

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        source, own = self._locate(index)
        return source.tokens(own, start, end)

    def trained(self, index: int, start: int, end: int) -> np.ndarray | None:
        source, own = self._locate(index)
        return source.trained(own, start, end)

    def _locate(self, index: int) -> tuple[SequenceDataset, int]:
        number = index if self._numbers is None else int(self._numbers[index])
        source = bisect_right(self._starts, number) - 1
        return self._sources[source], number - self._starts[source]


def weighted(sources: Sequence[SequenceDataset], weights: Sequence[float], num_samples: int, seed: int) -> DocumentBlend:
    """Return draws, to be used unshuffled, of which every beginning has sources in proportion to their weights by sequences.

    Each source is shuffled and starts over when used up; a longer blend starts with the shorter one, as a resumed run needs.
    """
    # Here and not at the top: in a clone of Megatron-LM these helpers are compiled only when training starts.
    from megatron.core.datasets import helpers

    shares = np.asarray(weights, dtype=np.float64)
    if np.any(shares < 0) or not 0 < shares.sum() < np.inf:
        raise EppError(f"the weights {list(weights)} of --data-path must be finite, not negative, and not all 0")
    source_of, counts = np.zeros(num_samples, dtype=np.int16), np.zeros(num_samples, dtype=np.int64)
    helpers.build_blending_indices(source_of, counts, shares / shares.sum(), len(sources), num_samples, False)
    del counts
    starts = [0, *accumulate(map(len, sources))]
    numbers = np.zeros(num_samples, dtype=np.min_scalar_type(starts[-1]))
    for number, (start, end) in enumerate(pairwise(starts)):
        draws = np.flatnonzero(source_of == number)
        for epoch, first in enumerate(range(0, len(draws), end - start)):
            of_epoch = draws[first : first + end - start]  # draw number n of a source is entry n of its epochs
            numbers[of_epoch] = start + epoch_start(len(of_epoch), end - start, seed, epoch, number).astype(np.int64)
    return DocumentBlend(sources, numbers)
