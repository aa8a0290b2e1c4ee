"""Measured times and bytes of actions, and lines fitted to the times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_epp.cost.line_fits import LEAST_US, Point, fit_line
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import NO_RECOMPUTE, Op, Recompute

_DETERMINED = 0.1
"""Least spread of a combination of coefficients over the measured passes, as a share of their time, for it to be fitted.

Others stay as by the earlier line. Passes of equal time, as slices are cut, cannot tell a time per token from one per pair, and
passes of nearly equal size tell nothing but how fast the machine is. In 200 random cases with times that are 10 % off,
predictions for other cuts are wrong by 4 %, the worst of each by 10 %; with 0.03 by 6 % and 16 %, and with a line fitted freely
by 8 % and 26 %. From 0.1 to 0.25 they are the same."""

_LEAST_UNIT = 0.25
"""Share of the time in which a coefficient is measured that is about zero by the earlier line. With 0.1 it stays
where it is, whatever passes take; with 0.5 errors are a third larger (see `_DETERMINED`).
"""

_ROUNDS = 2
"""Fits, each near the one before: relative errors count, and the first takes them relative to the earlier line's times."""

_TOLD = 0.1
"""Least part of a coefficient in the determined combinations, 0 to 1, for it to count as told by the times. For the log."""

_DISTURBED = 2.0
"""Ratio of a time to the line through all times above which it is left out: the rank did something else meanwhile."""


Coefficients = NDArray[np.float64]


class Timed(NamedTuple):
    """Measured time of an action."""

    tokens: int  # of its chunk, padded; for vocabulary shards and their collectives, tokens that pass the output layer
    pairs: int  # causal query-key pairs of its chunk; 0 where the time does not depend on them
    time_us: float
    recompute: Recompute = NO_RECOMPUTE  # layers that recomputed in it
    output_share: float = 1.0  # share of the tokens that passed the output layer and the loss, where the stage has them
    reads: int = 0  # tokens ahead of its slice
    gathered: int = 0  # tokens whose keys and values it put in a row (`ChunkWork.gathered_tokens`)

    @property
    def size(self) -> tuple[int, int, int]:
        """Tokens, pairs and reads, on which a line's time depends."""
        return self.tokens, self.pairs, self.reads


@dataclass(slots=True)
class Learnt:
    """Measurements of one rank."""

    # Of forwards, backwards (with the weight gradient, also where that is split) and split weight gradients by stage; of the
    # passes of vocabulary shards (S, T) by pipeline rank
    times: dict[tuple[int, Op], list[Timed]] = field(default_factory=dict)
    # Tokens and bytes kept by stage, from forward to backward (F) and from backward to weight gradient (W)
    sizes: dict[tuple[int, Op], list[tuple[int, int]]] = field(default_factory=dict)
    peak_bytes: int = 0  # most bytes allocated in the recorded iterations; 0, like no `sizes`, where memory is not measured
    offloadable_share: float | None = None  # share of the kept bytes that can be offloaded; None where it is not measured
    pipeline: int = 0  # a number that the ranks of a pipeline have in common, and no others
    # Of vocabulary shards, from this rank's entry to its end, by operation, iteration and chunk
    collectives: dict[tuple[Op, int, int], Timed] = field(default_factory=dict)


def fitted_line(earlier: LinearTime, times: Sequence[Timed], pairs: bool = True) -> LinearTime:
    """Fit a line to times, near the earlier one: what the times do not determine stays, scaled by their median ratio to it.

    The time of launching stays, unless a pass took less. Equal sizes count by their median. Times far above the line are left
    out, and it is fitted to the others again.
    """
    points = _points(earlier, times, pairs)
    if not points:
        return earlier
    whole = fit_line(points, pairs).line
    calm = [point for point in points if point.time_us <= _DISTURBED * whole.time_us(point.tokens, point.pairs)]
    line = _columns(earlier, pairs)
    for _ in range(_ROUNDS):
        line = _near(line, calm or points, pairs)
    fixed_us, per_token_us, per_pair_us = line.tolist()
    per_read_us, launch_us = _reads_as_pairs(earlier, pairs) * per_pair_us, min(earlier.launch_us, *(t.time_us for t in times))
    return LinearTime(fixed_us, per_token_us, per_pair_us, per_read_us=per_read_us, launch_us=launch_us)


def undetermined(earlier: LinearTime, times: Sequence[Timed]) -> tuple[str, ...]:
    """Return the names of the coefficients whose ratio to the others times leave as by the earlier line."""
    points, line = _points(earlier, times, True), _columns(earlier, True)
    if not points or not line.any():
        return ()
    shares, _ = _shares(line, points, [*np.flatnonzero(line)])
    directions, _ = _determined(shares)
    determined = (directions**2).sum(axis=0) if len(directions) else np.zeros(shares.shape[1])
    names = np.array(("fixed time", "time per token", "time per pair"))[np.flatnonzero(line)]
    return tuple(names[determined < _TOLD].tolist()) if len(names) > 1 else ()


def _points(earlier: LinearTime, times: Sequence[Timed], pairs: bool) -> list[Point]:
    """Return the median time of each size.

    Slices of equal length read more as their pairs grow, so a read counts as so many pairs as by the earlier line.
    """
    by_size: dict[tuple[int, float], list[float]] = {}
    for timed in times:
        size = timed.tokens, timed.pairs + _reads_as_pairs(earlier, pairs) * timed.reads
        by_size.setdefault(size, []).append(timed.time_us)
    return [Point(*size, max(statistics.median(of_size), LEAST_US)) for size, of_size in sorted(by_size.items())]


def _reads_as_pairs(earlier: LinearTime, pairs: bool) -> float:
    return earlier.per_read_us / earlier.per_pair_us if pairs and earlier.per_pair_us else 0.0


def _columns(line: LinearTime, pairs: bool) -> Coefficients:
    return np.array((line.fixed_us, line.per_token_us, line.per_pair_us if pairs else 0.0))


def _shares(line: Coefficients, points: Sequence[Point], free: Sequence[int]) -> tuple[Coefficients, Coefficients]:
    """Return what units of the free coefficients contribute to each pass, as shares of its time by the line; and the units: the
    coefficients themselves, or where that is more, what makes `_LEAST_UNIT` of the time on average.
    """
    sizes = np.array([(1.0, point.tokens, point.pairs) for point in points])
    per_time = sizes[:, free] / (sizes @ line)[:, None]
    units = np.maximum(line[free], _LEAST_UNIT / np.maximum(per_time.mean(axis=0), 1e-30))
    return per_time * units, units


def _determined(shares: Coefficients) -> tuple[Coefficients, Coefficients]:
    varied, spreads, directions = np.linalg.svd(shares - shares.mean(axis=0), full_matrices=False)
    is_determined = spreads >= _DETERMINED * np.sqrt(len(shares))
    return directions[is_determined], (varied / np.where(spreads > 0, spreads, 1.0))[:, is_determined]


def _near(earlier: Coefficients, points: Sequence[Point], pairs: bool) -> Coefficients:
    """Fit a line to points: the earlier one, scaled, and changed by the combinations that vary enough. None is below zero."""
    free = [0, 1, 2] if pairs else [0, 1]
    times_us = np.array([point.time_us for point in points])
    while (line := np.where(np.isin(range(3), free), earlier, 0.0)).any():
        shares, units = _shares(line, points, free)
        ratios = times_us / np.array([line @ (1.0, point.tokens, point.pairs) for point in points])
        directions, varied = _determined(shares)
        change = directions.T @ (varied.T @ (ratios - ratios.mean()))
        fitted = line[free] * np.median(ratios - shares @ change) + change * units
        if (fitted >= 0).all():
            line[free] = fitted
            return line
        free.pop(int((fitted / units).argmin()))
    return _columns(fit_line(points, pairs).line, pairs)


def ratio_to(earlier: LinearTime, times: Sequence[Timed]) -> float:
    """Median ratio of measured times to an earlier line's; 1 if there are none."""
    ratios = [timed.time_us / by_line for timed in times if (by_line := earlier.time_us(*timed.size)) > 0]
    return statistics.median(ratios) if ratios else 1.0
