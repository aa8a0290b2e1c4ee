"""Refusal of problems that no planner can plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import ChunkWork, causal_pairs
from megatron_epp.plan import NO_RECOMPUTE, InfeasibleError, PlanError, Recompute, Remedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.spans import refuse_forced_cuts

MOST_TOKENS = 1 << 40
"""Most tokens of a batch, after padding: far more than any has, and few enough for sums in 64 bits."""
MOST_PAIRS = 1 << 62
"""Most query-key pairs of a batch: their sums over chunks stay within 64 bits."""
MOST_BYTES = 1 << 60
"""Most bytes of a batch on one stage, as one chunk. Sums of many such sizes stay below what 64 bits hold."""
MOST_US = 1e18
"""Longest time of all passes of a batch on one stage: thirty thousand years."""
_CHECK = "look at the lengths, the token multiple and the costs"


def static_bytes(problem: Problem, costs: Costs) -> list[int]:
    """Return the bytes that each rank holds throughout: weights, gradients, optimizer state and buffers."""
    ranks = [0] * problem.num_ranks
    for stage, rank in enumerate(problem.placement):
        ranks[rank] += costs.static_bytes(stage)
    return ranks


def require_one_stage_per_rank(problem: Problem, options: Options) -> None:
    """Raise `PlanError` where a planner that knows only one stage on each rank, in order, is asked for another placement."""
    if not problem.has_one_stage_per_rank:
        raise PlanError(
            f"planner {options.planner!r} places one stage on each rank, in order; it cannot use placement "
            f"{list(problem.placement)} (leave out the flags that put several on one)"
        )


def require_whole(options: Options, tokens: int) -> None:
    """Raise `InfeasibleError` where a planner that does not cut has a longest chunk, padded, of more than `chunk_tokens`."""
    if options.chunk_tokens is not None and tokens > options.chunk_tokens:
        raise InfeasibleError(
            f"planner {options.planner!r} does not cut sequences: it needs chunks of {tokens} tokens, above the "
            f"{options.chunk_tokens} that are allowed",
            Remedy("raise", "chunk_tokens", tokens),
            Remedy("set", "planner", "greedy"),
        )


def validate(problem: Problem, costs: Costs, options: Options) -> None:
    """Refuse a problem that no planner here can plan.

    Raises `PlanError` if sizes do not match, a number is out of range, a rank has no stage, or the batch is larger than plans
    hold, and `InfeasibleError` if the token cap is below the multiple that chunks are padded to.
    """
    stages = problem.num_stages
    if not problem.lengths or min(problem.lengths) < 1:
        raise PlanError(f"a batch needs sequences of at least one token each; got lengths {list(problem.lengths)[:8]}")
    if problem.trained and len(problem.trained) != len(problem.lengths):
        raise PlanError(f"there are trained tokens of {len(problem.trained)} sequences, and lengths of {len(problem.lengths)}")
    of_sequences = ("loss groups", problem.loss_groups), ("microbatches", problem.microbatches), ("spans", problem.spans)
    for what, numbers in of_sequences:
        if numbers and len(numbers) != len(problem.lengths):
            raise PlanError(f"there are {what} of {len(numbers)} sequences, and lengths of {len(problem.lengths)}")
    if not stages or set(problem.placement) != set(range(problem.num_ranks)):
        raise PlanError(
            f"placement {list(problem.placement)} must put a stage on each of {problem.num_ranks} ranks "
            f"({problem.num_ranks} caps)"
        )
    if len(costs.num_layers) != stages:
        raise PlanError(f"the placement has {stages} stages, but the costs are of {len(costs.num_layers)}")
    if problem.token_multiple < 1:
        raise PlanError(f"token multiple {problem.token_multiple} must be at least 1")
    if options.slices is not None and options.slices < 1:
        raise PlanError(f"slices {options.slices} must be at least 1")
    if options.recompute != "auto" and (not isinstance(options.recompute, int) or options.recompute < 0):
        raise PlanError(f"recompute {options.recompute!r} must be 'auto' or a number of layers")
    if options.chunk_tokens is not None and options.chunk_tokens < problem.token_multiple:
        raise InfeasibleError(
            f"chunks of at most {options.chunk_tokens} tokens cannot be padded to a multiple of {problem.token_multiple}",
            Remedy("raise", "chunk_tokens", problem.token_multiple),
        )
    if problem.spans and options.chunk_tokens is not None and not problem.microbatches:
        refuse_forced_cuts(problem.lengths, problem.spans, problem.token_multiple, options.chunk_tokens)
    check_amounts(problem.lengths, costs, problem.token_multiple)


def check_amounts(lengths: Sequence[int], costs: Costs, token_multiple: int = 1) -> None:
    """Refuse a batch whose times or bytes are negative, infinite, not numbers, or more than a plan can hold. Raises `PlanError`
    with the stage and the amount.
    """
    tokens = sum(-(-length // token_multiple) * token_multiple for length in lengths)
    pairs = sum(causal_pairs(0, length) for length in lengths)
    if tokens > MOST_TOKENS or pairs > MOST_PAIRS:
        raise PlanError(
            f"{len(lengths):,} sequences of up to {max(lengths):,} tokens make {tokens:,} tokens padded to multiples of "
            f"{token_multiple:,} and {pairs:,} pairs of tokens, more than can be planned ({MOST_TOKENS:,} and {MOST_PAIRS:,})"
        )
    work = as_one_chunk(tokens, pairs)
    for stage in sorted(set(costs.equal_stages)):
        by = f"of {tokens:,} tokens on stage {stage}, by the costs {costs.name!r}"
        try:
            with np.errstate(over="raise", invalid="raise"):
                times_us, sizes = sum(_times_us(stage, work, costs)), sum(_bytes(stage, work, costs))
        except (FloatingPointError, OverflowError) as error:
            raise PlanError(f"the times or bytes {by}, are more than a plan can hold ({error}); {_CHECK}") from None
        if not times_us <= MOST_US:
            raise PlanError(f"the passes {by}, take {times_us:.3g} us; a plan holds at most {MOST_US:.3g} us: {_CHECK}")
        if sizes > MOST_BYTES:
            raise PlanError(
                f"the activations and weights {by}, take {sizes:.3g} bytes; a plan holds at most {MOST_BYTES:.3g}: {_CHECK}"
            )


def as_one_chunk(tokens: int, pairs: int) -> ChunkWork:
    """All sequences in one chunk, which counts as a slice of many: so keys and values, and their fp32 gradient, count too."""
    count, num_pairs, none = (np.array([number], dtype=np.int64) for number in (tokens, pairs, 0))
    there = np.ones(1, dtype=np.bool_)
    return ChunkWork(
        tokens=count,
        pairs=num_pairs,
        sliced=there,
        first=there,
        last=there,
        prefix_tokens=none,
        cache_tokens=count,
        num_slices=count,
    )


def _times_us(stage: int, work: ChunkWork, costs: Costs) -> Iterator[float]:
    layers = costs.num_layers[stage]
    yield _positive("forward_us", costs.forward_us(stage, work))
    yield _positive("backward_us", costs.backward_us(stage, work))
    yield _positive("weight_us", costs.weight_us(stage, work))
    yield _positive("message_us", costs.message_us(work))
    for mode in costs.recompute_modes:
        yield _positive("recompute_us", costs.recompute_us(stage, work, Recompute(**{mode: layers})))


def _bytes(stage: int, work: ChunkWork, costs: Costs) -> Iterator[int]:
    yield costs.static_bytes(stage)
    for name, amounts in (
        ("activation_bytes", costs.activation_bytes(stage, work, NO_RECOMPUTE)),
        ("cache_bytes", costs.cache_bytes(stage, work)),
        ("gradient_bytes", costs.gradient_bytes(stage, work)),
        ("weight_bytes", costs.weight_bytes(stage, work)),
        ("layer_peak_bytes", costs.layer_peak_bytes(stage, work).num_bytes),
        ("transient_bytes", costs.transient_bytes(stage, work)),
        *((f"pass_items {name}", amounts) for name, amounts in costs.pass_items(stage, work).items()),
    ):
        yield int(_positive(name, amounts))


def _positive(name: str, amounts: np.ndarray) -> float:
    """Return the only entry of `amounts`. Raises `OverflowError` if it is negative."""
    amount = float(amounts[0])
    if amount < 0:
        raise OverflowError(f"{name} is {amount:.3g}")
    return amount
