"""Bytes and measured times of a run's vocabulary shards, and the check of costs from a file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.cost import Line, PipelineCosts
from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.mcore.arguments.vocabulary import FLAG, vocabulary_shares
from megatron_epp.mcore.model.block_loss import block_tokens_of
from megatron_epp.plan import EppError
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.loss.pipeline_shards import Rank, ShardGroups
from megatron_epp.runtime.loss.shards import Logits, logits_pass, weight_gradient
from megatron_epp.runtime.tools.profiling import Timer

_FP32_BYTES = 4
_TOKENS = (128, 512, 1024, 2048)
_MOVED_TOKENS = (64, 1024)
_MOVES = 12
"""Repetitions of a collective, of which the fastest counts, as for messages."""


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
    wanted, found = vocabulary_shares(args), () if costs.vocabulary is None else costs.vocabulary.shares
    if len(wanted) != len(found) or not all(map(math.isclose, wanted, found)):
        what = "has the output layer on the last stage" if not found else f"divides the vocabulary by {list(found)}"
        raise EppError(
            f"{args.epp_costs} {what} and this run, with {FLAG} {args.epp_vocab_parallel}, does not: give another file, or "
            "measure (--epp-costs measure)"
        )


class Measured(Rank, Protocol):
    """Rank whose shard is measured."""

    groups: ShardGroups
    hidden_size: int
    """Size of the layer's input."""
    token_ranks: int
    """Number of context-parallel ranks that share the tokens of a chunk."""

    @property
    def num_parts(self) -> int:
        """Number of tensor-parallel ranks that each have a part of the last stage's output."""


def with_measured_shards(costs: PipelineCosts, rank: Measured | None, links: Links) -> PipelineCosts:
    """Return costs with measured times of vocabulary shards, the largest of all ranks; unchanged without shards.

    A collective call.

    Args:
        costs: with the bytes of this run.
        rank: this rank's shard; None if there are none.
        links: of the ranks that run the same plan.
    """
    if costs.vocabulary is None or rank is None:
        return costs
    position = dist.get_rank(rank.groups.spread)
    logits, gradient = (costs.vocabulary.of_whole(line, position) for line in _passes(rank))
    everyone = links.control.from_each((logits, gradient, _moves(rank, _spread), _moves(rank, _gather)))
    logits, gradient, spread, gather = (reduce(Line.larger, lines) for lines in zip(*everyone, strict=True))
    return replace(costs, vocabulary=replace(costs.vocabulary, logits=logits, gradient=gradient, spread=spread, gather=gather))


def _passes(rank: Measured) -> tuple[Line, Line]:
    """Measure the passes of this rank's shard: lines of `S` and of `T`."""
    dtype, device = rank.message()
    shard, timer = replace(rank.shard(), accumulate=None), Timer(device)  # which would add to the model's gradient
    first: list[Point] = []
    second: list[Point] = []
    for count in _TOKENS:
        x = torch.randn((count, rank.hidden_size), dtype=dtype, device=device)
        labels, weights = torch.arange(count, device=device) % 2, torch.ones(count, device=device)
        make = partial(logits_pass, x, labels, shard, needs_gradient=True)

        def use(made: Logits, x: Tensor = x, labels: Tensor = labels, weights: Tensor = weights) -> None:
            weight_gradient(x, labels, made, made.summary.most, weights, shard)

        tokens = count * rank.token_ranks
        first.append(Point(tokens, 0, timer.median_us(make)))
        second.append(Point(tokens, 0, timer.median_us(use, make)))
    return fit_line(first, pairs=False).line, fit_line(second, pairs=False).line


def _spread(rank: Measured, count: int) -> None:
    dtype, device = rank.message()
    part = torch.zeros((count // rank.num_parts, rank.hidden_size), dtype=dtype, device=device)
    dist.broadcast(part, rank.groups.root, group=rank.groups.spread)


def _gather(rank: Measured, count: int) -> None:
    device = rank.message()[1]
    dist.all_reduce(torch.zeros(count, device=device), dist.ReduceOp.MAX, group=rank.groups.statistics)
    dist.all_reduce(torch.zeros((2, count), device=device), group=rank.groups.statistics)
    dist.reduce(torch.zeros((count, rank.hidden_size), device=device), rank.groups.root, group=rank.groups.gather)


def _moves(rank: Measured, move: Callable[[Measured, int], None]) -> Line:
    """Fit a line to the fastest of several collectives of a number of tokens."""
    timer, points = Timer(rank.message()[1], alone=False), []
    for count in _MOVED_TOKENS:
        best_us = math.inf
        for _ in range(_MOVES):
            start_us = timer.now_us()
            move(rank, count)
            best_us = min(best_us, timer.now_us() - start_us)
        points.append(Point(count * rank.token_ranks, 0, best_us))
    return fit_line(points, pairs=False).line
