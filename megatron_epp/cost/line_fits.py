"""Fits of the cost model's lines to measured points, with their residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_epp.cost.work import LinearTime

LEAST_US = 1e-3
"""Shorter times count as this one, the tick of the host's clocks: no error is relative to a time of zero."""


class Point(NamedTuple):
    """One measurement. tokens, pairs: of the chunk (bytes of a message go as tokens)."""

    tokens: float
    pairs: float
    time_us: float


@dataclass(frozen=True, slots=True)
class LineFit:
    """A line through points, and its error ``(line - measured) / measured`` at every one."""

    line: LinearTime
    errors: tuple[float, ...]

    def residuals(self) -> dict[str, float]:
        """Number of points, and the median and largest absolute relative error of the line."""
        distances = np.abs(self.errors)
        return {"points": len(self.errors), "median": float(np.median(distances)), "worst": float(distances.max())}


def fit_line(points: Sequence[Point], pairs: bool = True) -> LineFit:
    """Fit by least squares over relative errors, so that large points do not dominate; no coefficient is below zero."""
    times = np.maximum([point.time_us for point in points], LEAST_US)
    columns = [np.ones(len(points)), [p.tokens for p in points], [p.pairs for p in points]][: 3 if pairs else 2]
    matrix = np.array(columns, dtype=float).T / times[:, None]
    scale = np.where((largest := np.abs(matrix).max(axis=0)) > 0, largest, 1.0)
    active = list(range(matrix.shape[1]))
    solution = np.zeros(3)
    while active:
        part = np.linalg.lstsq(matrix[:, active] / scale[active], np.ones(len(points)), rcond=None)[0]
        if (part >= 0).all():
            solution[active] = part / scale[active]
            break
        active.pop(int(part.argmin()))
    line = LinearTime(*solution.tolist())
    return LineFit(line, tuple(line.time_us(p.tokens, p.pairs) / t - 1.0 for p, t in zip(points, times.tolist(), strict=True)))
