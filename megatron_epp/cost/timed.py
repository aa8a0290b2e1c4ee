"""Measured times and bytes of actions, and lines fitted to the times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.cost.work import NO_TIME, Line
from megatron_epp.plan import NO_RECOMPUTE, Op, Recompute

_SIZES, _SPREAD = 4, 2.0
"""Least number of different sizes, and least ratio of the largest to the smallest, for a line of three coefficients to be
fitted. With less, the earlier line is scaled: through nearly equal points many lines go, and most mislead for other sizes."""

_DISTURBED = 2.0
"""Ratio of a time to the line through all times above which it is left out: the rank did something else meanwhile."""


class Timed(NamedTuple):
    """Measured time of an action.

    Attributes:
        tokens: of its chunk, padded; for vocabulary shards and their collectives, tokens that pass the output layer.
        pairs: causal query-key pairs of its chunk; 0 where the time does not depend on them.
        time_us: measured.
        recompute: layers that recomputed in it.
        output_share: share of the tokens that passed the output layer and the loss, where the stage has them.
        reads: tokens ahead of its slice.
    """

    tokens: int
    pairs: int
    time_us: float
    recompute: Recompute = NO_RECOMPUTE
    output_share: float = 1.0
    reads: int = 0

    @property
    def size(self) -> tuple[int, int, int]:
        """Tokens, pairs and reads, on which a line's time depends."""
        return self.tokens, self.pairs, self.reads


@dataclass(slots=True)
class Learnt:
    """Measurements of one rank.

    Attributes:
        times: of forwards, backwards (with the weight gradient, also where that is split) and split weight gradients by stage;
            of the passes of vocabulary shards (S, T) by pipeline rank.
        sizes: tokens and bytes kept by stage, from forward to backward (F) and from backward to weight gradient (W); empty
            where memory is not measured.
        peak_bytes: most bytes allocated in the recorded iterations; 0 where memory is not measured.
        offloadable_share: share of the kept bytes that can be offloaded; None where it is not measured.
        pipeline: any number that the ranks of a pipeline have in common, and no others.
        collectives: of vocabulary shards, from this rank's entry to its end, by operation, iteration and chunk.
    """

    times: dict[tuple[int, Op], list[Timed]] = field(default_factory=dict)
    sizes: dict[tuple[int, Op], list[tuple[int, int]]] = field(default_factory=dict)
    peak_bytes: int = 0
    offloadable_share: float | None = None
    pipeline: int = 0
    collectives: dict[tuple[Op, int, int], Timed] = field(default_factory=dict)


def fitted_line(earlier: Line, times: Sequence[Timed], pairs: bool = True) -> Line:
    """Fit a line to times, or scale the earlier one if there are too few sizes.

    The time of launching stays, unless a pass took less. Equal sizes count by their median. Times far above the line are left
    out, and it is fitted to the others again.

    Args:
        times: as measured; if there are none, the earlier line stays.
        pairs: whether the time may depend on pairs.
    """
    least_us = min((one.time_us for one in times), default=earlier.launch_us)
    return replace(_device_line(earlier, times, pairs), launch_us=min(earlier.launch_us, least_us))


def _device_line(earlier: Line, times: Sequence[Timed], pairs: bool) -> Line:
    """Fit a line whatever the time of launching; arguments as in `fitted_line`.

    Slices of equal length read as their pairs grow, so times do not tell reads from pairs: a read counts as so many pairs as by
    the earlier line.
    """
    as_pairs = earlier.per_read_us / earlier.per_pair_us if pairs and earlier.per_pair_us else 0.0
    by_size: dict[tuple[int, float], list[float]] = {}
    for one in times:
        by_size.setdefault((one.tokens, one.pairs + as_pairs * one.reads), []).append(one.time_us)
    points = [Point(*size, statistics.median(found)) for size, found in sorted(by_size.items())]
    tokens = [point.tokens for point in points]
    if earlier != NO_TIME and (len(points) < _SIZES or max(tokens) < _SPREAD * min(tokens)):
        return earlier.scaled(ratio_to(earlier, times))
    if not points:
        return earlier
    line = fit_line(points, pairs).line
    rest = [point for point in points if point.time_us <= _DISTURBED * line.time_us(point.tokens, point.pairs)]
    line = line if len(rest) == len(points) else fit_line(rest, pairs).line
    return replace(line, per_read_us=as_pairs * line.per_pair_us)


def ratio_to(earlier: Line, times: Sequence[Timed]) -> float:
    """Median ratio of measured times to an earlier line's; 1 if there are none."""
    ratios = [one.time_us / by_line for one in times if (by_line := earlier.time_us(*one.size)) > 0]
    return statistics.median(ratios) if ratios else 1.0
