"""Division of a line of items into consecutive pieces so that a pipeline's latency is least (TeraPipe, DynaPipe).

A pipeline of ``p`` equal stages takes ``sum(t) + (p - 1) max(t)`` for pieces that take ``t`` on a stage. For every bound on the
longest piece, dynamic programming finds the pieces with the least sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_BOUNDS = 128
"""Bounds on the longest piece that are tried, at equal ratios where there are more pieces of unequal time."""
Times = NDArray[np.float64]


def least_latency(times_us: Times, num_stages: int, sums_us: Times | None = None) -> list[int]:
    """Choose the pieces with the least ``sum(t) + (num_stages - 1) max(t)``, exactly if at most `MOST_BOUNDS` times differ.

    Args:
        times_us: time of the piece from one boundary to a later one on a stage, ``[from][to]``; infinite where it may not be.
        sums_us: what the same piece adds to the sum, if that is another time: all sequences are cut at the same tokens.

    Returns:
        The boundaries at which pieces end, the last one included; empty if every division has a piece that may not be.
    """
    sums_us = times_us if sums_us is None else sums_us
    best_us, best = np.inf, list[int]()
    for bound_us in _bounds(times_us[np.isfinite(times_us)]):
        if (num_stages - 1) * bound_us >= best_us:
            break
        ends = _least_sum(np.where(times_us <= bound_us, sums_us, np.inf))
        if not ends:
            continue
        pieces = [0, *ends[:-1]], ends
        took_us = float(sums_us[pieces].sum() + (num_stages - 1) * times_us[pieces].max())
        if took_us < best_us:
            best_us, best = took_us, ends
    return best


def _bounds(times_us: Times) -> list[float]:
    """Return times of pieces, rising: all that differ, or `MOST_BOUNDS` of them."""
    rising = np.unique(times_us)
    if len(rising) > MOST_BOUNDS:
        least = max(float(rising[0]), float(rising[-1]) * 1e-6)
        at = np.searchsorted(rising, np.geomspace(least, float(rising[-1]), MOST_BOUNDS) * (1 - 1e-12))
        rising = np.unique(rising[np.minimum(at, len(rising) - 1)])
    return [float(time_us) for time_us in rising]


def _least_sum(times_us: Times) -> list[int]:
    """Return the ends of the pieces with the least sum of times; empty if there are none."""
    count = len(times_us)
    least, came = np.full(count, np.inf), np.zeros(count, dtype=np.int64)
    least[0] = 0.0
    for end in range(1, count):
        sums = least[:end] + times_us[:end, end]
        came[end] = sums.argmin()
        least[end] = sums[came[end]]
    if not np.isfinite(least[-1]):
        return []
    ends, end = list[int](), count - 1
    while end:
        ends.append(end)
        end = int(came[end])
    return ends[::-1]
