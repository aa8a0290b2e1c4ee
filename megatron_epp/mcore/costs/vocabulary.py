"""Bytes of a run's vocabulary shards, and the check of costs from a file."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from megatron_epp.cost import PipelineCosts
from megatron_epp.mcore.arguments.vocabulary import FLAG, vocabulary_shares
from megatron_epp.mcore.model.block_loss import block_tokens_of
from megatron_epp.plan import EppError

_FP32_BYTES = 4


def with_shard_bytes(args: argparse.Namespace, costs: PipelineCosts) -> PipelineCosts:
    """Return costs with the bytes that the runtime's shards hold of a chunk (`runtime.loss.shards`).

    From `S` to `T` these are the exponentials in the weights' type, or nothing if logits are recomputed by blocks; the
    broadcast input, gathered over tensor-parallel ranks; and in fp32 its gradient. While `S` runs, there are fp32
    exponentials too.
    """
    shards = costs.vocabulary
    if shards is None:
        return costs
    entries, value_bytes = args.padded_vocab_size / args.tensor_model_parallel_size, 2 if args.bf16 or args.fp16 else 4
    wide = _FP32_BYTES if value_bytes < _FP32_BYTES else 0
    # A token of a chunk is on one of the context-parallel ranks.
    hidden, ranks = args.hidden_size / args.context_parallel_size, args.context_parallel_size
    blocks = block_tokens_of(args)
    return replace(
        costs,
        vocabulary=replace(
            shards,
            kept_bytes_per_token=0.0 if blocks else entries * value_bytes / ranks,
            input_bytes_per_token=hidden * (value_bytes + _FP32_BYTES),
            passing_bytes_per_token=0.0 if blocks else entries * wide / ranks,
            workspace_bytes=float(blocks * entries * (value_bytes + _FP32_BYTES)),
        ),
    )


def check_shares(args: argparse.Namespace, costs: PipelineCosts) -> None:
    """Raise `EppError` for costs from a file that have the output layer on other ranks than this run."""
    of_run, shares = vocabulary_shares(args), () if costs.vocabulary is None else costs.vocabulary.shares
    if len(of_run) != len(shares) or not all(map(math.isclose, of_run, shares)):
        what = "has the output layer on the last stage" if not shares else f"divides the vocabulary by {list(shares)}"
        raise EppError(
            f"{args.epp_costs} {what} and this run, with {FLAG} {args.epp_vocab_parallel}, does not: give another file, or "
            "learn them (--epp-costs learn)"
        )
