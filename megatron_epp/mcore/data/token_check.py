"""Check, before training starts, that the tokens of a file are those of the run's tokenizer."""

from __future__ import annotations

import logging

import numpy as np
from megatron.core.utils import log_single_rank

from megatron_epp.data.token_record import SUFFIX, Tokenizer, TokenRecord, check_ids, check_tokenizer, load_record
from megatron_epp.mcore.data.document_dataset import DocumentFile

logger = logging.getLogger(__name__)

_SAMPLED_DOCUMENTS, _SAMPLED_TOKENS = 16, 4096
"""Number of documents, evenly spaced, that are sampled in a file without a record, and number of tokens of each.

Every token is checked again when it is trained on; the sample finds most mistakes earlier.
"""


def check_tokens(file: DocumentFile, run: Tokenizer, *, masks_eod: bool = False) -> None:
    """Compare a file's token record with the run's tokenizer, or without a record, a sample of tokens with the vocabulary.

    Args:
        file: the opened file.
        run: the run's tokenizer.
        masks_eod: see `check_tokenizer`.

    Raises:
        EppError: the tokens were made with another tokenizer, or are not in the vocabulary.
    """
    record = load_record(file.prefix)
    if record is not None and not _is_of(record, file):
        log_single_rank(
            logger,
            logging.WARNING,
            f"{file.prefix}{SUFFIX} is of {record.num_documents:,} documents with {record.num_tokens:,} tokens, and the pair"
            f" has {len(file):,} with {_num_tokens(file):,}: it is of another pair, and is not gone by",
        )
        record = None
    if record is not None:
        check_tokenizer(file.prefix, record, run, masks_eod=masks_eod)
        return
    log_single_rank(
        logger,
        logging.INFO,
        f"{file.prefix} has no record of its tokenizer ({SUFFIX}, as `megatron-epp prepare` writes it): its tokens are taken to"
        f" be those of this run's, {run}",
    )
    for document in np.unique(np.linspace(0, len(file) - 1, _SAMPLED_DOCUMENTS, dtype=np.int64)).tolist():
        length = min(_SAMPLED_TOKENS, int(file.num_tokens[document]))
        if length:
            first = int(file.data.document_indices[document])
            check_ids(file.prefix, file.data.get(first, offset=0, length=length), run.vocab_size)


def _is_of(record: TokenRecord, file: DocumentFile) -> bool:
    return (record.num_documents, record.num_tokens) == (len(file), _num_tokens(file))


def _num_tokens(file: DocumentFile) -> int:
    return int(file.num_tokens.sum(dtype=np.int64))
