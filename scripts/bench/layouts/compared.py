"""Layouts of one model, planned and measured: times of each, and ratios, with a verdict on how well the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from megatron_epp.contrib.demos.rounds import Occupancy, Rounds, doubt
from megatron_epp.report.text import table

EVEN, AUTO, VOCABULARY = "even", "auto", "vocabulary"
"""Even layers, a searched layout, and one searched with the vocabulary over all ranks."""
CLOSE = 0.05
"""Largest error of a measured ratio, as a share of the planned one, that counts as agreement."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One training with a layout: means over the iterations that count, in microseconds.

    Attributes:
        planned_us: makespan as planned.
        measured_us: makespan as measured.
        own_us: makespan of the plan if every action takes its processor time: without what other programs took.
        iteration_us: Megatron's time of an iteration, optimizer included.
    """

    planned_us: float
    measured_us: float
    own_us: float
    iteration_us: float

    @staticmethod
    def mean(each: Sequence[Trained]) -> Trained:
        """Return the means of several iterations."""
        return Trained(*(fmean(getattr(iteration, name) for iteration in each) for name in Trained.__slots__))


@dataclass(frozen=True, slots=True)
class Measured:
    """All trainings with one layout.

    Attributes:
        name: value of `--epp-layout`, or `VOCABULARY`.
        layers: of every stage, as the log names them.
        rounds: one training each.
    """

    name: str
    layers: str
    rounds: tuple[Trained, ...]

    def median_us(self, figure: str) -> float:
        """Median of a field of `Trained` over the rounds."""
        return median(getattr(run, figure) for run in self.rounds)

    @property
    def measured_us(self) -> Rounds:
        """Measured makespan of every round."""
        return Rounds(tuple(run.measured_us for run in self.rounds))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of a layout over that of another, by plan and by measurement."""

    planned: float
    measured: float

    @property
    def error(self) -> float:
        """``measured / planned - 1``."""
        return self.measured / self.planned - 1


def ratio(layout: Measured, base: Measured, figure: str = "measured_us") -> Ratio:
    """Return the ratio of two layouts, measured by a field of `Trained`."""
    planned, measured = (layout.median_us(name) / base.median_us(name) for name in ("planned_us", figure))
    return Ratio(planned, measured)


def verdict(layout: Measured, base: Measured, occupancy: Occupancy) -> str:
    """Say whether the measured ratio is the planned one, or why that is not known."""
    if layout.layers == base.layers:
        return f"the same layers as {base.name}"
    if reason := doubt(layout.measured_us, base.measured_us, occupancy):
        return reason
    error = ratio(layout, base).error
    return f"{'as planned, within' if abs(error) <= CLOSE else 'not as planned: more than'} {CLOSE:.0%}"


def lines_of(layouts: Sequence[Measured], occupancy: Occupancy) -> list[str]:
    """Format the layouts as a table, and below it their ratios to even layers with the verdict."""
    header = ["layout", "layers", "planned (ms)", "measured (ms)", "spread", "iteration (ms)", "by processor time (ms)"]
    figures = ("planned_us", "measured_us", "iteration_us", "own_us")
    rows = []
    for layout in layouts:
        planned, measured, iteration, own = (f"{layout.median_us(name) / 1e3:.0f}" for name in figures)
        rows.append([layout.name, layout.layers, planned, measured, f"{layout.measured_us.spread:.0%}", iteration, own])
    base = next(layout for layout in layouts if layout.name == EVEN)
    lines = table(header, rows, left=(0, 1))
    for layout in layouts:
        if layout is not base:
            lines.append(f"{layout.name} / even: {_words(layout, base)}; {verdict(layout, base, occupancy)}")
    return lines


def _words(layout: Measured, base: Measured) -> str:
    makespan, iteration, own = (ratio(layout, base, name) for name in ("measured_us", "iteration_us", "own_us"))
    return (
        f"{makespan.planned:.3f} planned, {makespan.measured:.3f} measured ({makespan.error:+.1%}), "
        f"{own.measured:.3f} by processor time ({own.error:+.1%}), {iteration.measured:.3f} with the optimizer"
    )


def report_of(layouts: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the figures of the layouts for JSON."""
    return [
        {
            "layout": layout.name,
            "layers": layout.layers,
            "rounds": [{name: getattr(r, name) for name in r.__slots__} for r in layout.rounds],
        }
        for layout in layouts
    ]
