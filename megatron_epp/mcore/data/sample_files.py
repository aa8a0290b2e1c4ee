"""Splits of a run on samples (`--epp-samples`): each file whole, on every rank."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.data.indexed_documents import any_trained
from megatron_epp.data.samples import columns_of, read_samples
from megatron_epp.data.token_record import Tokenizer
from megatron_epp.losses import NextToken, load_loss
from megatron_epp.mcore.data.documents import Shuffled
from megatron_epp.mcore.model.replayed_routes import routing_by_flags
from megatron_epp.plan.errors import EppError


def build(args: Namespace, num_samples: Sequence[int], tokenizer: Tokenizer, train_tokens: int) -> list[Shuffled | None]:
    """Read the samples of training, and of evaluation if there is another file."""
    asks = columns_of(NextToken() if args.epp_loss is None else load_loss(args.epp_loss))
    limits = args.seq_length, tokenizer.vocab_size, routing_by_flags(args)
    files = [read_samples(Path(path), asks, *limits) for path in args.epp_samples[:2]]
    train, valid = files[0], files[1] if len(files) > 1 else None
    if args.eval_iters > 0 and valid is None:
        raise EppError("--epp-samples has no file for evaluation: give a second one, or pass --eval-iters 0")
    if train is not None and not any_trained(train, range(len(train))):
        raise EppError(f"no token of {args.epp_samples[0]} is trained")
    return [None if args.skip_train else (train, True), (valid, True) if args.eval_iters > 0 and valid else None, None]


def check_files(args: Namespace) -> None:
    """Leave them to `build`, which reads them whole."""
