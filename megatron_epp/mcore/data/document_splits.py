"""Splits of a run whose sequences are documents, or parts of them (`--epp-documents split` and `truncate`)."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
from megatron.core.datasets import blended_megatron_dataset_config as config
from megatron.core.utils import log_single_rank

from megatron_epp.data.indexed_documents import MASK_SUFFIX
from megatron_epp.data.token_record import Tokenizer
from megatron_epp.mcore.data import document_dataset
from megatron_epp.mcore.data.document_dataset import DocumentDataset, DocumentFile, check_tokens
from megatron_epp.mcore.data.documents import SPLITS, Shuffled, blends, check_record, no_documents, prefixes_of, wanted_splits
from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)


def build(args: Namespace, num_samples: Sequence[int], tokenizer: Tokenizer, train_tokens: int) -> list[Shuffled | None]:
    blend, blend_per_split = blends(args)
    if blend_per_split is not None and args.split is not None:
        log_single_rank(logger, logging.WARNING, f"--split {args.split} changes nothing: every split has data paths of its own")
    files: dict[str, DocumentFile] = {}
    shares: list[tuple[float, float] | None] = [(0.0, 1.0)] * 3 if blend is None else _split_shares(args.split)
    wanted = wanted_splits(args)
    splits: list[Shuffled | None] = []
    for number, name in enumerate(SPLITS):
        its_blend = blend if blend_per_split is None else blend_per_split[number]
        split = None
        if wanted[number] and its_blend is not None and (share := shares[number]) is not None:
            parts = [_open_part(args, tokenizer, files, name, share, prefix) for prefix in its_blend[0]]
            _check_trained([part for part in parts if part is not None], name)
            split = _build_split(parts, its_blend[1], num_samples[number], args.seed, 0 if number else train_tokens)
        if split is None and wanted[number] and name != "test":
            raise no_documents(args, name, of_split=bool(blend))
        splits.append(split)
    return splits


def check_files(args: Namespace) -> None:
    """Check that files are there, masks have their size, and masks of training leave a token to train."""
    for prefix in prefixes_of(args):
        document_dataset.check_pair(prefix)
        document_dataset.check_mask_size(prefix)
        check_record(args, prefix)
    blend, blend_per_split = blends(args)
    train = None if args.skip_train or not args.seq_length else blend or (blend_per_split or (None,))[0]
    if train and all(os.path.exists(prefix + MASK_SUFFIX) for prefix in train[0]):
        files = (DocumentFile(prefix, args.mmap_bin_files) for prefix in train[0])
        how = args.epp_documents
        _check_trained([DocumentDataset(file, args.seq_length, long_documents=how) for file in files], "train")


def _check_trained(parts: Sequence[DocumentDataset], name: str) -> None:
    """Raise `EppError` if no token of the documents of training is trained; of other splits, warn."""
    if not parts or any(part.trains for part in parts):
        return
    why = f"no token of the {name} documents is trained: " + "; ".join(part.untrained() for part in parts)
    if name == "train":
        raise EppError(why)
    log_single_rank(logger, logging.WARNING, f"{why}. Their loss is 0")


def _open_part(
    args: Namespace, tokenizer: Tokenizer, files: dict[str, DocumentFile], name: str, share: tuple[float, float], prefix: str
) -> DocumentDataset | None:
    """Return a split's share of one file; None if it has no documents. Each file is opened and checked once, then kept."""
    if prefix not in files:
        files[prefix] = DocumentFile(prefix, args.mmap_bin_files)
        check_tokens(files[prefix], tokenizer, masks_eod=args.eod_mask_loss)
        document_dataset.check_mask(files[prefix])
    file = files[prefix]
    # Rounded as Megatron rounds, so that splits join up without gap or overlap.
    first, last = (round(edge * len(file)) for edge in share)
    if first == last:
        log_single_rank(logger, logging.WARNING, f"{name} {prefix}: --split {args.split} gives it no documents")
        return None
    documents, vocab_size = args.epp_documents, tokenizer.vocab_size
    return DocumentDataset(file, args.seq_length, first, last, name, long_documents=documents, vocab_size=vocab_size)


def _build_split(
    parts: list[DocumentDataset | None], weights: list[float] | None, num_samples: int, seed: int, num_tokens: int
) -> Shuffled | None:
    """Join the datasets of a split's files. Of weighted files draw `num_samples` sequences, or more to have `num_tokens`."""
    sources = [source for source in parts if source is not None]
    if len(sources) < 2:
        return (sources[0], True) if sources else None
    if weights is None:
        return document_dataset.DocumentBlend(sources), True
    own_weights = [weight for source, weight in zip(parts, weights, strict=True) if source is not None]
    draws = document_dataset.weighted(sources, own_weights, num_samples, seed)
    while draws.lengths.sum(dtype=np.int64) < num_tokens:
        num_samples = 2 * max(1, num_samples)
        draws = document_dataset.weighted(sources, own_weights, num_samples, seed)
    return draws, False


def _split_shares(split: str | None) -> list[tuple[float, float] | None]:
    """Convert a split such as ``"969,30,1"`` to each split's start and end as shares of a file; None for a split of size 0."""
    if split is None:
        raise EppError("--split is missing; pass for instance --split 99,1,0 (train, validation, test)")
    try:
        with np.errstate(invalid="ignore"):
            vector = config.parse_and_normalize_split(split)
    except (AssertionError, ValueError) as error:
        raise EppError(f"--split {split} is not up to three shares like 99,1,0") from error
    if not np.isfinite(vector).all():
        raise EppError(f"--split {split} gives no split a share; pass for instance --split 99,1,0")
    return config.convert_split_vector_to_split_matrix(vector)
