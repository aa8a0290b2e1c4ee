"""Iterators of global batches for Megatron's loop (``--dataloader-type external``), and the check that a resume keeps them."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from pkgutil import resolve_name

from megatron_epp.data.batch import SequenceDataset
from megatron_epp.data.iterator import PlannedBatches, PlanSource, samples_in
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler
from megatron_epp.data.token_record import Tokenizer, check_kind, identity_of, load_record
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
Shuffled = tuple[SequenceDataset, bool]

SPLITS = ("train", "valid", "test")
_HERE = "megatron_epp.mcore.data."
SOURCES = {"stream": f"{_HERE}stream", "samples": f"{_HERE}sample_files"}
SOURCES |= dict.fromkeys(("split", "truncate"), f"{_HERE}document_splits")
"""Modules that read what a run trains on, by ``--epp-documents``; with ``--epp-samples`` that of samples.

`build` returns the splits, given flags, `num_samples`, tokenizer and `train_tokens` of `build_splits`; `check_files` raises
`EppError` for files that no run can train on, and reads no token.
"""


def build_document_iterators(
    args: Namespace,
    train_plans: PlanSource | None,
    eval_plans: PlanSource | None,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_samples: Sequence[int],
) -> tuple[PlannedBatches | None, PlannedBatches | None, PlannedBatches | None]:
    """Build iterators over the batches of the train, validation and test documents, the same on every rank of the job.

    None stands for a split that is not wanted, or a test without documents; plans are of this replica, None for none. Training
    goes on from consumed samples. Raises `EppError` for unusable flags or files, or no documents where they are wanted.
    """
    tokenizer, batch_tokens = identity_of_run(args), getattr(args, "epp_batch_tokens", None)
    # A batch of one sequence for each replica may have more.
    most_tokens = max(batch_tokens, data_parallel_size * args.seq_length) * (args.train_iters or 0) if batch_tokens else 0
    splits = build_splits(args, num_samples, tokenizer, most_tokens)
    consumed = (args.consumed_train_samples, 0 if args.skip_train else args.consumed_valid_samples, 0)
    eod = tokenizer.eod if args.eod_mask_loss else None
    if args.eod_mask_loss and eod is None:
        raise EppError(f"--eod-mask-loss: this run's tokenizer ({tokenizer}) has no end-of-document token; leave it out")

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
        plans, depth = eval_plans if number else train_plans, getattr(args, "epp_lookahead", 2)
        return PlannedBatches(dataset, sampler, plans, depth, eod, data_parallel_rank, data_parallel_size)

    return iterator(0), iterator(1), iterator(2)


def build_splits(
    args: Namespace, num_samples: Sequence[int], tokenizer: Tokenizer, train_tokens: int = 0
) -> list[Shuffled | None]:
    """Build the datasets, each with True if it is shuffled, for so many sequences, or at most `train_tokens` positions."""
    splits: list[Shuffled | None] = resolve_name(f"{_source(args)}:build")(args, num_samples, tokenizer, train_tokens)
    return splits


def check_files_of(args: Namespace) -> None:
    """Raise `EppError` for files that are not as the run's source needs them. No token is read."""
    resolve_name(f"{_source(args)}:check_files")(args)


def _source(args: Namespace) -> str:
    return SOURCES["samples" if getattr(args, "epp_samples", None) else args.epp_documents]


def wanted_splits(args: Namespace) -> tuple[bool, bool, bool]:
    return not args.skip_train, args.eval_iters > 0, args.eval_iters > 0


def no_documents(args: Namespace, name: str, *, of_split: bool) -> EppError:
    remedy = f"give it a share in --split {args.split}" if of_split else f"pass --{name}-data-path"
    remedy += ", or pass --eval-iters 0" if name == "valid" else ""
    return EppError(f"the {name} split has no documents; {remedy}")


def prefixes_of(args: Namespace) -> list[str]:
    blend, blend_per_split = blends(args)
    return [prefix for own in (blend, *(blend_per_split or ())) if own for prefix in own[0]]


def check_record(args: Namespace, prefix: str) -> None:
    """Raise `EppError` if the tokens of a prefix are of another kind of tokenizer than the run's."""
    record = load_record(prefix)
    if record is not None and args.tokenizer_type is not None:
        check_kind(prefix, record, args.tokenizer_type, args.tokenizer_model)


def check_order(then: Namespace, now: Namespace) -> None:
    """Compare the order of sequences with a checkpoint's: others raise `EppError`, the same in another order are warned of."""
    if not getattr(then, "epp", False):
        return
    if (before := then.epp_documents) != now.epp_documents:
        was = f"--epp-documents was {before} in the run that saved this checkpoint, and is {now.epp_documents}"
        todo = f"Pass --epp-documents {before} to go on exactly, or --finetune to begin the data anew"
        raise EppError(f"{was}: its count of sequences is of others. {todo}")
    names = ["seed", "split", *["seq_length"] * (before != "truncate")]
    other = [name for name in names if hasattr(then, name) and getattr(then, name) != getattr(now, name)]
    changed = [f"{flag_of(name)} was {getattr(then, name)} and is {getattr(now, name)}" for name in other]
    if changed and now.rank == 0:
        what = "sequences come in another order than in the run that saved this checkpoint"
        logger.warning("%s: %s, so until the epoch ends some come again and others do not", ", ".join(changed), what)


def blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, KeyError, ValueError, OSError) as error:
        why = f"{type(error).__name__}: {error}"
        raise EppError(f"the data paths cannot be read ({why}); give prefixes, or weight and prefix in turn") from error
    if blend_per_split is not None:
        blend_per_split = [own if own and own[0] else None for own in blend_per_split]
    if not (blend and blend[0]) and not (blend_per_split and any(blend_per_split)):
        how = "`megatron-epp prepare` makes one from text files or JSONL"
        raise EppError(f"there are no documents to train on; pass --data-path with the prefix of a .bin/.idx pair ({how})")
    return blend, blend_per_split


def identity_of_run(args: Namespace) -> Tokenizer:
    """Return the identity of the tokenizer that Megatron has built for this run, or would build."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import global_vars

    return identity_of(global_vars._GLOBAL_TOKENIZER or build_tokenizer(args), args)
