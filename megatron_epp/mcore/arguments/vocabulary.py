"""Vocabulary parallelism over pipeline ranks: whether a run has it, how rows are divided, and what it cannot honour."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from itertools import pairwise

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.flag import MegatronFlag

logger = logging.getLogger(__name__)

FLAG = "--epp-vocab-parallel"
_CONFLICTS = (
    MegatronFlag("--fp16", advice="use --bf16: small probabilities would leave the range of fp16"),
    MegatronFlag("--init-model-with-meta-device", advice="leave it out: the first weights are divided over ranks"),
    MegatronFlag("--logits-save-top-k", advice="leave it out: no rank has all logits of a token"),
    MegatronFlag("--fp8-output-proj", advice="leave it out: shards multiply in the type of the weights"),
    MegatronFlag("--label-smoothing", (None, 0, 0.0), "set it to 0"),
    MegatronFlag("--hybrid-layer-pattern", advice="train a GPTModel"),
    MegatronFlag("--hybrid-override-pattern", advice="train a GPTModel"),
    MegatronFlag("--mtp-num-layers", advice="leave it out: its predictions need the whole output layer on one rank"),
    MegatronFlag("--defer-embedding-wgrad-compute", advice="leave it out: T defers it"),
)


_MULTIPLES = (64, 8)
"""Numbers of rows by whose multiples a large vocabulary is divided, since matrix products are faster then."""
_EVENNESS = 64
"""Smallest shard for which this is done, in multiples, so that shards differ by about a 64th at most. Not measured."""


def shards_vocabulary(args: argparse.Namespace) -> bool:
    """Return True if a run's output layer is divided over its pipeline ranks, which is settled before the model is built."""
    return getattr(args, "epp_vocab_parallel", "off") == "on"


def vocabulary_rows(entries: int, num_ranks: int) -> tuple[range, ...]:
    """Divide the rows of one tensor-parallel rank over the pipeline ranks.

    Raises:
        ArgumentError: there are fewer rows than ranks.
    """
    if entries < num_ranks:
        raise ArgumentError(
            f"{FLAG} on divides a vocabulary of {entries} entries on each tensor-parallel rank over "
            f"--pipeline-model-parallel-size {num_ranks} ranks, some of which would have none: set it to off"
        )
    multiple = next((m for m in _MULTIPLES if entries // num_ranks >= _EVENNESS * m), 1)
    bounds = [*(entries * rank // num_ranks // multiple * multiple for rank in range(num_ranks)), entries]
    return tuple(range(start, end) for start, end in pairwise(bounds))


def vocabulary_shares(args: argparse.Namespace) -> tuple[float, ...]:
    """Return the share of the output layer on each pipeline rank; empty if the last stage has all of it."""
    if not shards_vocabulary(args):
        return ()
    entries = args.padded_vocab_size // args.tensor_model_parallel_size
    return tuple(len(rows) / entries for rows in vocabulary_rows(entries, args.pipeline_model_parallel_size))


def vocabulary_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what cannot be honoured with vocabulary parallelism, one line each, with the flag to change.

    Where a run leaves the choice to us, it has none then, which a log line says.
    """
    if args.epp_vocab_parallel == "auto" and (problems := [*_problems(args)]):
        if args.rank == 0:
            logger.info("%s auto: the output layer stays on the last stage, since %s", FLAG, problems[0])
        args.epp_vocab_parallel = "off"
    if args.epp_vocab_parallel == "on":
        yield from _problems(args)


def settle_vocabulary(args: argparse.Namespace, *, shards: bool) -> None:
    """Replace ``auto`` by a decision: divide the output layer if `shards`. Any other setting stays as it is."""
    if args.epp_vocab_parallel == "auto":
        args.epp_vocab_parallel = "on" if shards else "off"


def _problems(args: argparse.Namespace) -> Iterator[str]:
    ranks = args.pipeline_model_parallel_size
    if getattr(args, "cross_entropy_loss_fusion", False) and args.rank == 0:
        logger.warning("--cross-entropy-loss-fusion has no effect with %s on: shards compute the loss", FLAG)
    if ranks < 2:
        yield f"{FLAG} on divides the output layer over --pipeline-model-parallel-size {ranks} ranks: leave it out"
    if args.epp_schedule != "elastic":
        yield f"{FLAG} on is for --epp-schedule elastic, not {args.epp_schedule}: leave one of them out"
    for conflict in _CONFLICTS:
        if conflict.is_given(args):
            yield f"{FLAG} on does not go with {conflict.flag} {getattr(args, conflict.attribute)} ({conflict.advice})"
    entries = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if entries is not None and entries // args.tensor_model_parallel_size < ranks:
        yield (
            f"{FLAG} on divides a vocabulary of {entries} entries over {args.tensor_model_parallel_size} x {ranks} ranks, some "
            "of which would have none: leave it out"
        )
    for flag in ("--save", "--load"):
        if getattr(args, flag[2:], None) and (kind := getattr(args, "ckpt_format", "torch_dist")) != "torch_dist":
            yield f"{FLAG} on with {flag} needs --ckpt-format torch_dist, not {kind}, which cannot divide a weight over stages"
