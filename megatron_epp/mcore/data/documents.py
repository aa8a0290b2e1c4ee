"""Iterators of global batches for Megatron's training loop, built from its data flags, and the check that a resume keeps them.

They need ``--dataloader-type external``, with which Megatron passes the provider's objects on to the schedule.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.utils import log_single_rank

from megatron_epp.data.batch import SequenceDataset
from megatron_epp.data.indexed_documents import MASK_SUFFIX
from megatron_epp.data.iterator import PlannedBatches, PlanSource, samples_in
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler
from megatron_epp.data.token_record import Tokenizer, check_kind, load_record
from megatron_epp.data.trained_tokens import any_trained
from megatron_epp.mcore.data.document_dataset import DocumentBlend, DocumentDataset, weighted
from megatron_epp.mcore.data.document_file import (
    DocumentFile,
    check_mask,
    check_mask_size,
    check_pair,
    check_tokens,
    refuse_mask,
)
from megatron_epp.mcore.data.encoders import identity_of_run
from megatron_epp.mcore.data.stream import build_streams
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
Shuffled = tuple[SequenceDataset, bool]

SPLITS = ("train", "valid", "test")


def build_document_iterators(
    args: Namespace,
    train_plans: PlanSource | None,
    eval_plans: PlanSource | None,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_samples: Sequence[int],
) -> tuple[PlannedBatches | None, PlannedBatches | None, PlannedBatches | None]:
    """Build iterators over the global batches of the train, validation and test documents, for this replica.

    Every rank of the job builds the same iterators; tokens are read only by ranks that ask a batch for its chunks. The result
    has None for a split that is not wanted, and for a test split without documents. Raises `EppError` for unusable flags or
    files, tokens of another tokenizer than the run's, or no documents for training or for a wanted validation.

    Args:
        args: Megatron's parsed arguments. Training and validation go on exactly from their consumed samples.
        train_plans, eval_plans: sources of the plans for this replica's part of a batch; None for no plans.
        num_samples: numbers of sequences that train, validation and test will draw, as Megatron passes them to its dataset
            providers.
    """
    tokenizer = identity_of_run(args)
    batch_tokens = getattr(args, "epp_batch_tokens", None)
    # A batch of one sequence for each replica may have more.
    most_tokens = max(batch_tokens, data_parallel_size * args.seq_length) * (args.train_iters or 0) if batch_tokens else 0
    splits = build_splits(args, num_samples, tokenizer, most_tokens)
    consumed = (args.consumed_train_samples, 0 if args.skip_train else args.consumed_valid_samples, 0)
    eod = _masked_end(tokenizer) if args.eod_mask_loss else None

    def iterator(number: int) -> PlannedBatches | None:
        if (split := splits[number]) is None:
            return None
        dataset, shuffle = split
        begin = consumed[number], args.seed, shuffle
        if batch_tokens and not number:
            sampler: GlobalBatchSampler = TokenBatchSampler(samples_in(dataset), batch_tokens, data_parallel_size, *begin)
        else:
            size = args.eval_global_batch_size if number else args.global_batch_size
            sampler = GlobalBatchSampler(len(samples_in(dataset)), size, *begin)
        plans = eval_plans if number else train_plans
        depth = getattr(args, "epp_lookahead", 2)
        return PlannedBatches(dataset, sampler, plans, depth, eod, data_parallel_rank, data_parallel_size)

    return iterator(0), iterator(1), iterator(2)


def build_splits(
    args: Namespace, num_samples: Sequence[int], tokenizer: Tokenizer, train_tokens: int = 0
) -> list[Shuffled | None]:
    """Build the train, validation and test datasets, each with a flag: True if it is to be shuffled every epoch.

    Args:
        num_samples: numbers of sequences that train, validation and test will draw.
        train_tokens: positions that training will draw at most, if its batches are of a number of tokens.
    """
    if getattr(args, "epp_samples", None):
        return _samples(args, tokenizer)
    blend, blend_per_split = _blends(args)
    if args.epp_documents == "stream":
        return _streams(args, num_samples, tokenizer, list(filter(None, (blend, *(blend_per_split or ())))))
    if blend_per_split is not None and args.split is not None:
        log_single_rank(logger, logging.WARNING, f"--split {args.split} changes nothing: every split has data paths of its own")
    files: dict[str, DocumentFile] = {}
    shares: list[tuple[float, float] | None] = [(0.0, 1.0)] * 3 if blend is None else _split_shares(args.split)
    wanted = (not args.skip_train, args.eval_iters > 0, args.eval_iters > 0)
    splits: list[Shuffled | None] = []
    for number, name in enumerate(SPLITS):
        its_blend = blend if blend_per_split is None else blend_per_split[number]
        split = None
        if wanted[number] and its_blend is not None and (share := shares[number]) is not None:
            parts = [_open_part(args, tokenizer, files, name, share, prefix) for prefix in its_blend[0]]
            _check_trained([part for part in parts if part is not None], name)
            split = _build_split(parts, its_blend[1], num_samples[number], args.seed, 0 if number else train_tokens)
        if split is None and wanted[number] and name != "test":
            raise _no_documents(args, name, of_split=bool(blend))
        splits.append(split)
    return splits


def _samples(args: Namespace, tokenizer: Tokenizer) -> list[Shuffled | None]:
    """Read the samples of training, and of evaluation if there is another file; each file whole, on every rank."""
    from megatron_epp.data.samples import columns_of, read_samples
    from megatron_epp.losses import NextToken, load_loss
    from megatron_epp.mcore.model.replayed_routes import routing_by_flags

    asks = columns_of(NextToken() if args.epp_loss is None else load_loss(args.epp_loss))
    limits = args.seq_length, tokenizer.vocab_size, routing_by_flags(args)
    files = [read_samples(Path(path), asks, *limits) for path in args.epp_samples[:2]]
    train, valid = files[0], files[1] if len(files) > 1 else None
    if args.eval_iters > 0 and valid is None:
        raise EppError("--epp-samples has no file for evaluation: give a second one, or pass --eval-iters 0")
    if train is not None and not any_trained(train, range(len(train))):
        raise EppError(f"no token of {args.epp_samples[0]} is trained")
    return [None if args.skip_train else (train, True), (valid, True) if args.eval_iters > 0 and valid else None, None]


def _check_trained(parts: Sequence[DocumentDataset], name: str) -> None:
    """Raise `EppError` if no token of the documents of training is trained; of other splits, warn."""
    if not parts or any(part.trains for part in parts):
        return
    why = f"no token of the {name} documents is trained: " + "; ".join(part.untrained() for part in parts)
    if name == "train":
        raise EppError(why)
    log_single_rank(logger, logging.WARNING, f"{why}. Their loss is 0")


def _no_documents(args: Namespace, name: str, *, of_split: bool) -> EppError:
    remedy = f"give it a share in --split {args.split}" if of_split else f"pass --{name}-data-path"
    remedy += ", or pass --eval-iters 0" if name == "valid" else ""
    return EppError(f"the {name} split has no documents; {remedy}")


def _streams(args: Namespace, num_samples: Sequence[int], tokenizer: Tokenizer, blends: list[Blend]) -> list[Shuffled | None]:
    """Build Megatron's own samples of the splits, in Megatron's order; their files are checked like all others."""
    for prefix in dict.fromkeys(prefix for prefixes, _ in blends for prefix in prefixes):
        refuse_mask(prefix)
        check_tokens(DocumentFile(prefix, args.mmap_bin_files), tokenizer, masks_eod=args.eod_mask_loss)
    built = build_streams(args, num_samples, tokenizer.vocab_size, SPLITS)
    wanted = (not args.skip_train, args.eval_iters > 0, args.eval_iters > 0)
    for name, split, is_wanted in zip(SPLITS, built, wanted, strict=True):
        if is_wanted and name != "test" and not split:
            raise _no_documents(args, name, of_split=args.data_path is not None)
    return [(split, False) if is_wanted and split else None for split, is_wanted in zip(built, wanted, strict=True)]


def check_files_of(args: Namespace) -> None:
    """Raise `EppError` for a data path without files, with a mask of another size, or with tokens of another kind of tokenizer,
    and for files to train on whose masks leave no token to train. No token is read.
    """
    if getattr(args, "epp_samples", None):
        return
    blend, blend_per_split = _blends(args)
    for blend_of_split in (blend, *(blend_per_split or ())):
        for prefix in blend_of_split[0] if blend_of_split else ():
            check_pair(prefix)
            check_mask_size(prefix)
            if args.epp_documents == "stream":
                refuse_mask(prefix)
            record = load_record(prefix)
            if record is not None and args.tokenizer_type is not None:
                check_kind(prefix, record, args.tokenizer_type, args.tokenizer_model)
    train = None if args.skip_train or not args.seq_length else blend or (blend_per_split or (None,))[0]
    if train and args.epp_documents != "stream" and all(os.path.exists(prefix + MASK_SUFFIX) for prefix in train[0]):
        files = (DocumentFile(prefix, args.mmap_bin_files) for prefix in train[0])
        how = args.epp_documents
        _check_trained([DocumentDataset(file, args.seq_length, long_documents=how) for file in files], "train")


def check_order(then: Namespace, now: Namespace) -> None:
    """Compare the arguments that determine the order of sequences, unless the checkpoint is of a run without `--epp`.

    Changes that only reorder the sequences cause a warning. Raises `EppError` if the sequences differ, so that the checkpoint's
    count of sequences trained on has no meaning in this run.
    """
    if not getattr(then, "epp", False):
        return
    before = then.epp_documents
    if before != now.epp_documents:
        raise EppError(
            f"--epp-documents was {before} in the run that saved this checkpoint, and is {now.epp_documents}: its count of "
            f"sequences is of others. Pass --epp-documents {before} to go on exactly, or --finetune to begin the data anew"
        )
    names = ["seed", "split", *(["seq_length"] if before != "truncate" else [])]
    changed = [
        f"{flag_of(name)} was {getattr(then, name)} and is {getattr(now, name)}"
        for name in names
        if hasattr(then, name) and getattr(then, name) != getattr(now, name)
    ]
    if changed and now.rank == 0:
        logger.warning(
            "%s: sequences come in another order than in the run that saved this checkpoint, so until the epoch ends some come "
            "again and others do not",
            ", ".join(changed),
        )


def _open_part(
    args: Namespace, tokenizer: Tokenizer, files: dict[str, DocumentFile], name: str, share: tuple[float, float], prefix: str
) -> DocumentDataset | None:
    """Return a split's share of one file; None if it has no documents. Each file is opened and checked once, then kept."""
    if prefix not in files:
        files[prefix] = DocumentFile(prefix, args.mmap_bin_files)
        check_tokens(files[prefix], tokenizer, masks_eod=args.eod_mask_loss)
        check_mask(files[prefix])
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
        return DocumentBlend(sources), True
    own_weights = [weight for source, weight in zip(parts, weights, strict=True) if source is not None]
    draws = weighted(sources, own_weights, num_samples, seed)
    while draws.lengths.sum(dtype=np.int64) < num_tokens:
        num_samples = 2 * max(1, num_samples)
        draws = weighted(sources, own_weights, num_samples, seed)
    return draws, False


def _blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return one blend for all splits, or one for each, depending on which of Megatron's data path flags are given."""
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, KeyError, ValueError, OSError) as error:
        raise EppError(
            f"the data paths cannot be read ({type(error).__name__}: {error}); give prefixes, or weight and prefix in turn"
        ) from error
    if blend_per_split is not None:
        blend_per_split = [own if own and own[0] else None for own in blend_per_split]
    if not (blend and blend[0]) and not (blend_per_split and any(blend_per_split)):
        raise EppError(
            "there are no documents to train on; pass --data-path with the prefix of a .bin/.idx pair"
            " (`megatron-epp prepare` makes one from text files or JSONL)"
        )
    return blend, blend_per_split


def _split_shares(split: str | None) -> list[tuple[float, float] | None]:
    """Convert a split such as ``"969,30,1"`` to each split's start and end as shares of a file; None for a split of size 0."""
    if split is None:
        raise EppError("--split is missing; pass for instance --split 99,1,0 (train, validation, test)")
    try:
        with np.errstate(invalid="ignore"):
            vector = parse_and_normalize_split(split)
    except (AssertionError, ValueError) as error:
        raise EppError(f"--split {split} is not up to three shares like 99,1,0") from error
    if not np.isfinite(vector).all():
        raise EppError(f"--split {split} gives no split a share; pass for instance --split 99,1,0")
    return convert_split_vector_to_split_matrix(vector)


def _masked_end(tokenizer: Tokenizer) -> int:
    if tokenizer.eod is None:
        raise EppError(f"--eod-mask-loss: this run's tokenizer ({tokenizer}) has no end-of-document token; leave it out")
    return tokenizer.eod
