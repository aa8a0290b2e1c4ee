"""Check that the times and bytes of a batch are numbers that a plan can hold, before any planner adds them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_epp.cost import Costs
from megatron_epp.cost.work import ChunkWork, causal_pairs
from megatron_epp.plan import NO_RECOMPUTE, PlanError, Recompute

MOST_TOKENS = 1 << 40
"""Most tokens of a batch, after padding."""
MOST_PAIRS = 1 << 62
MOST_BYTES = 1 << 60
"""Most bytes of a batch on one stage, as one chunk. Sums of many such sizes stay below what 64 bits hold."""
MOST_US = 1e18
"""Longest time of all passes of a batch on one stage: thirty thousand years."""
_CHECK = "look at the lengths, the token multiple and the costs"


def check_amounts(lengths: Sequence[int], costs: Costs, token_multiple: int = 1) -> None:
    """Refuse a batch whose times or bytes are negative, infinite, not numbers, or more than a plan can hold.

    Args:
        lengths: tokens of every sequence.
        costs: time and memory of every stage.
        token_multiple: chunks are padded to a multiple of this.

    Raises:
        PlanError: a time or size is out of range. The message names the stage and the amount.
    """
    tokens = sum(-(-length // token_multiple) * token_multiple for length in lengths)
    pairs = sum(causal_pairs(0, length) for length in lengths)
    if tokens > MOST_TOKENS or pairs > MOST_PAIRS:
        raise PlanError(
            f"{len(lengths):,} sequences of up to {max(lengths):,} tokens make {tokens:,} tokens padded to multiples of "
            f"{token_multiple:,} and {pairs:,} pairs of tokens, more than can be planned ({MOST_TOKENS:,} and {MOST_PAIRS:,})"
        )
    work = _as_one_chunk(tokens, pairs)
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


def _as_one_chunk(tokens: int, pairs: int) -> ChunkWork:
    """All sequences in one chunk, which counts as a slice of many: so keys and values, and their fp32 gradient, count too."""
    count, one, none = (np.array([number], dtype=np.int64) for number in (tokens, pairs, 0))
    there = np.ones(1, dtype=np.bool_)
    return ChunkWork(
        tokens=count,
        pairs=one,
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
