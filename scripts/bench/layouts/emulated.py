"""The emulated part: Llama 3 8B on 4 to 16 stages with even layers and with the searched layout, compute as timed waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_epp.plan.layout import layers_text
from megatron_epp.report.table import table
from scripts.bench.layouts.bench import Run
from scripts.bench.layouts.compared import AUTO, EVEN, Ratio

MODEL, KIND, CONTEXT, CAP_GB = "llama3-8b", "wikipedia", 32_768, 141
SECONDS = 10.0
"""Length of an emulation with even layers."""


class Emulated(NamedTuple):
    """Makespans of one pipeline in microseconds of the emulated machine, by layout."""

    num_ranks: int
    layers: dict[str, str]
    planned_us: dict[str, float]
    measured_us: dict[str, float]

    @property
    def ratio(self) -> Ratio:
        """Searched layout over even layers."""
        return Ratio(*(times[AUTO] / times[EVEN] for times in (self.planned_us, self.measured_us)))


def emulate(num_ranks: int, seconds: float = SECONDS) -> Emulated:
    """Plan a batch with both layouts and emulate the plans.

    Args:
        num_ranks: of the pipeline.
        seconds: length of the emulation with even layers.
    """
    from scripts.bench.emulation import emulated_us  # which needs torch

    run = Run(KIND, CONTEXT, num_ranks, MODEL, CAP_GB)
    layouts = {name: run.layout(name) for name in (EVEN, AUTO)}
    plans = {name: run.planned(layout) for name, layout in layouts.items()}
    planned_us, measured_us = {}, {}
    for name, made in plans.items():
        assert made is not None, f"no plan of {name} layers fits {CAP_GB} GB"
        planned_us[name] = made.predicted.makespan_us
        measured_us[name] = emulated_us(made, seconds * 1e6 / planned_us[EVEN])
    layers = {name: _text(layout.halves, layout.placement.kind, num_ranks) for name, layout in layouts.items()}
    return Emulated(num_ranks, layers, planned_us, measured_us)


def _text(halves: Sequence[int], kind: str, num_ranks: int) -> str:
    """Format layers; those of several stages per rank with their placement."""
    return layers_text(halves) if len(halves) == num_ranks else f"{layers_text(halves)} ({kind})"


def lines_of(found: Sequence[Emulated]) -> list[str]:
    """Format pipelines as a table, and below it the layers."""
    header = [
        "ranks",
        "even (ms): planned",
        "measured",
        "auto: planned",
        "measured",
        "auto / even: planned",
        "measured",
        "error",
    ]
    rows = []
    for one in found:
        times = [f"{each[name] / 1e3:.1f}" for name in (EVEN, AUTO) for each in (one.planned_us, one.measured_us)]
        rows.append(
            [str(one.num_ranks), *times, f"{one.ratio.planned:.3f}", f"{one.ratio.measured:.3f}", f"{one.ratio.error:+.1%}"]
        )
    return [*table(header, rows), *(f"auto on {one.num_ranks} ranks: {one.layers[AUTO]}" for one in found)]
