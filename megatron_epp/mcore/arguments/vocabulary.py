"""Vocabulary parallelism over pipeline ranks: whether a run has it, and how rows are divided."""

from __future__ import annotations

import argparse
from itertools import pairwise

from megatron_epp.mcore.arguments import ArgumentError

VOCABULARY_FLAG = "--epp-vocab-parallel"
_MULTIPLES = (64, 8)  # numbers of rows by whose multiples a large vocabulary is divided, since matrix products are faster then
_EVENNESS = 64
"""Smallest shard for which this is done, in multiples, so that shards differ by about a 64th at most. Not measured."""


def shards_vocabulary(args: argparse.Namespace) -> bool:
    """Return True if a run's output layer is divided over its pipeline ranks, which is settled before the model is built."""
    return getattr(args, "epp_vocab_parallel", "off") == "on"


def vocabulary_rows(entries: int, num_ranks: int) -> tuple[range, ...]:
    """Divide the rows of one tensor-parallel rank over the pipeline ranks. Raises `ArgumentError` if there are too few."""
    if entries < num_ranks:
        what = f"{VOCABULARY_FLAG} on divides a vocabulary of {entries} entries on each tensor-parallel rank"
        ranks = f"--pipeline-model-parallel-size {num_ranks} ranks, some of which would have none"
        raise ArgumentError(f"{what} over {ranks}: set it to off")
    multiple = next((m for m in _MULTIPLES if entries // num_ranks >= _EVENNESS * m), 1)
    bounds = [*(entries * rank // num_ranks // multiple * multiple for rank in range(num_ranks)), entries]
    return tuple(range(start, end) for start, end in pairwise(bounds))


def vocabulary_shares(args: argparse.Namespace) -> tuple[float, ...]:
    """Return the share of the output layer on each pipeline rank; empty if the last stage has all of it."""
    if not shards_vocabulary(args):
        return ()
    entries = args.padded_vocab_size // args.tensor_model_parallel_size
    return tuple(len(rows) / entries for rows in vocabulary_rows(entries, args.pipeline_model_parallel_size))


def settle_vocabulary(args: argparse.Namespace, *, shards: bool) -> None:
    """Replace ``auto`` by a decision: divide the output layer if `shards`. Any other setting stays as it is."""
    if args.epp_vocab_parallel == "auto":
        args.epp_vocab_parallel = "on" if shards else "off"
