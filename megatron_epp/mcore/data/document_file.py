"""One Megatron ``.bin``/``.idx`` pair: opened, and checked against its index and against the run's tokenizer."""

from __future__ import annotations

import logging
import os

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.utils import log_single_rank

from megatron_epp.data.indexed_documents import MASK_SUFFIX, REMAKE, document_tokens, open_mask, read_header, sequence_ends
from megatron_epp.data.token_record import SUFFIX, Tokenizer, check_ids, check_tokenizer, load_record
from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)

_SAMPLED_DOCUMENTS, _SAMPLED_TOKENS = 16, 4096
"""Number of documents, evenly spaced, that are sampled in a file without a record or in a mask, and number of tokens of each.

Every token and every value of a mask is checked again when it is used; the sample finds most mistakes earlier.
"""


class DocumentFile:
    """One ``.bin``/``.idx`` pair, opened and checked once, from which several splits are taken. No token is read.

    With `mmap`, the ``.bin`` file and the mask are mapped instead of read (``--no-mmap-bin-files`` turns it off). `num_tokens`
    of each document, int32 or int64, are summed over its sentences; `mask` is None without a file. Raises `EppError` if a file
    is missing, empty, truncated, not an index, or does not match the others.
    """

    def __init__(self, prefix: str, mmap: bool = True) -> None:
        self.prefix = prefix
        check_pair(prefix)
        item_bytes = _item_bytes(f"{prefix}.idx")
        num_bytes = os.path.getsize(f"{prefix}.bin")
        if num_bytes == 0:
            raise EppError(f"{prefix}.bin is empty; {REMAKE}")
        try:
            self.data = IndexedDataset(prefix, multimodal=False, mmap=mmap)
        except (AssertionError, ValueError) as error:
            document_tokens(f"{prefix}.idx")  # names the sequence or document that is wrong
            raise EppError(f"{prefix}.idx contradicts itself ({str(error) or 'document boundaries'}); {REMAKE}") from error
        self.num_tokens: np.ndarray = _document_tokens(prefix, self.data, item_bytes, num_bytes)
        self._item_bytes = item_bytes
        self.mask = open_mask(prefix, self.total_tokens, mmap)

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
            raise EppError(
                f"there is no file {path}; --data-path takes prefixes of .bin/.idx pairs without the suffix, or weight and"
                " prefix in turn"
            )


def check_mask_size(prefix: str) -> None:
    """Raise `EppError` if a prefix has a mask of another number of tokens than its ``.bin`` file. No token is read."""
    if os.path.exists(prefix + MASK_SUFFIX):
        open_mask(prefix, os.path.getsize(f"{prefix}.bin") // _item_bytes(f"{prefix}.idx"))


def refuse_mask(prefix: str) -> None:
    """Raise `EppError` if a prefix has a mask, which samples of a stream do not use, as in Megatron."""
    if os.path.exists(prefix + MASK_SUFFIX):
        raise EppError(
            f"{prefix}{MASK_SUFFIX} is not used by --epp-documents stream, whose samples are Megatron's own: use"
            " --epp-documents split, or remove the mask to train on all tokens"
        )


def _item_bytes(path: str) -> int:
    code = read_header(path).type_code
    if code not in {kind.value for kind in DType}:
        raise EppError(f"{path} has token type {code}, which this Megatron cannot read; {REMAKE}")
    if not np.issubdtype(DType.dtype_from_code(code), np.integer):
        raise EppError(f"{path} has token type {code}, whose tokens are no integers; {REMAKE}")
    return DType.size(code)


def _document_tokens(prefix: str, data: IndexedDataset, item_bytes: int, num_bytes: int) -> np.ndarray:
    """Return the tokens of each document, after a check that every document is contiguous in the ``.bin`` file."""
    boundaries = data.document_indices
    ends = sequence_ends(f"{prefix}.idx", data.sequence_lengths, boundaries)
    if len(wrong := np.flatnonzero(data.index.sequence_pointers != ends[:-1] * item_bytes)):
        begins, first = data.index.sequence_pointers[wrong[0]], wrong[0]
        raise EppError(
            f"{prefix}.idx has sequences that do not follow one another in the .bin file: sequence {first} begins at byte "
            f"{begins}, and those before it end at {ends[first] * item_bytes}; {REMAKE}"
        )
    if num_bytes != ends[-1] * item_bytes:
        raise EppError(
            f"{prefix}.bin has {num_bytes} bytes but {prefix}.idx describes {ends[-1] * item_bytes}: they are not a pair or the"
            f" .bin is incomplete; {REMAKE}"
        )
    # A view of the file where every document is one sequence: ranks of a node share its pages.
    return data.sequence_lengths if (np.diff(boundaries) == 1).all() else np.diff(ends[boundaries])


def check_tokens(file: DocumentFile, run: Tokenizer, *, masks_eod: bool = False) -> None:
    """Compare a file's token record with the run's tokenizer, or without a record, a sample of tokens with the vocabulary.

    Raises `EppError` if the tokens were made with another tokenizer (see `check_tokenizer`), or are not in the vocabulary.
    """
    record = load_record(file.prefix)
    if record is not None and (record.num_documents, record.num_tokens) != (len(file), file.total_tokens):
        log_single_rank(
            logger,
            logging.WARNING,
            f"{file.prefix}{SUFFIX} is of {record.num_documents:,} documents with {record.num_tokens:,} tokens, and the pair"
            f" has {len(file):,} with {file.total_tokens:,}: it is of another pair, and is not gone by",
        )
        record = None
    if record is not None:
        check_tokenizer(file.prefix, record, run, masks_eod=masks_eod)
        return
    log_single_rank(
        logger,
        logging.INFO,
        f"{file.prefix} has no record of its tokenizer ({SUFFIX}, as `megatron-epp prepare` writes it): its tokens are taken to"
        f" be made with this run's, {run}",
    )
    for document in file.sampled_documents():
        length = min(_SAMPLED_TOKENS, int(file.num_tokens[document]))
        first = int(file.data.document_indices[document])
        ids = file.data.get(first, offset=0, length=length)
        check_ids(file.prefix, ids, run.vocab_size, file.first_token(document))


def check_mask(file: DocumentFile) -> None:
    """Log that a file has a mask, and check a sample of it. Raises `EppError` for values other than 0 and 1."""
    if file.mask is None:
        return
    log_single_rank(
        logger,
        logging.INFO,
        f"{file.prefix}{MASK_SUFFIX}: only tokens that this mask marks with 1 count in the loss, as labels",
    )
    for document in file.sampled_documents():
        first = file.first_token(document)
        file.mask.read(first, first + min(_SAMPLED_TOKENS, int(file.num_tokens[document])))
