"""The emulated part: Llama 3 8B on 4 to 16 stages with even layers and with searched layouts, compute as timed waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_epp.plan.layout import Layout, layers_text
from megatron_epp.report.text import table
from scripts.bench.layouts.bench import Run
from scripts.bench.layouts.compared import AUTO, EVEN, VOCABULARY, Ratio

MODEL, KIND, CONTEXT, CAP_GB = "llama3-8b", "wikipedia", 32_768, 141
SEARCHED = (AUTO, VOCABULARY)
SECONDS = 10.0
"""Length of an emulation with even layers."""


class Emulated(NamedTuple):
    """Makespans of one pipeline in microseconds of the emulated machine, by layout."""

    num_ranks: int
    layers: dict[str, str]
    planned_us: dict[str, float]
    measured_us: dict[str, float]

    def ratio(self, name: str) -> Ratio:
        """Return a searched layout over even layers."""
        return Ratio(*(times[name] / times[EVEN] for times in (self.planned_us, self.measured_us)))


def emulate(num_ranks: int, seconds: float = SECONDS) -> Emulated:
    """Plan a batch with each layout and emulate the plans."""
    from scripts.bench.emulation import emulated_us  # which needs torch

    run = Run(KIND, CONTEXT, num_ranks, MODEL, CAP_GB)
    layouts = {name: run.layout(name) for name in (EVEN, *SEARCHED)}
    plans = {name: run.planned(layout) for name, layout in layouts.items()}
    planned_us, measured_us = {}, {}
    for name, plan in plans.items():
        assert plan is not None, f"no plan of {name} layers fits {CAP_GB} GB"
        planned_us[name] = plan.predicted.makespan_us
        measured_us[name] = emulated_us(plan, seconds * 1e6 / planned_us[EVEN])
    layers = {name: _text(layout) for name, layout in layouts.items()}
    return Emulated(num_ranks, layers, planned_us, measured_us)


def _text(layout: Layout) -> str:
    """Format layers; those of several stages per rank with their placement."""
    where = "" if layout.placement.num_chunks == 1 else f" ({layout.placement.kind})"
    return layers_text(layout.halves) + where + ", vocabulary over all ranks" * layout.shards_vocabulary


def lines_of(results: Sequence[Emulated]) -> list[str]:
    """Format pipelines as a table, and below it the layers."""
    header = ["ranks", "layout", "planned (ms)", "measured (ms)", "/ even: planned", "measured", "error"]
    rows = []
    for result in results:
        for name in (EVEN, *SEARCHED):
            ratio, times = result.ratio(name), (result.planned_us[name], result.measured_us[name])
            cells = [f"{time_us / 1e3:.1f}" for time_us in times]
            shares = ["", "", ""] if name == EVEN else [f"{ratio.planned:.3f}", f"{ratio.measured:.3f}", f"{ratio.error:+.1%}"]
            rows.append([str(result.num_ranks), name, *cells, *shares])
    said = [f"{name} on {result.num_ranks} ranks: {result.layers[name]}" for result in results for name in SEARCHED]
    return [*table(header, rows, left=(1,)), *said]
