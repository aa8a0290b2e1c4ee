"""Several plans of one batch, drawn below each other on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulate import simulate
from megatron_epp.report import facts
from megatron_epp.report.boxes import planned_boxes
from megatron_epp.report.lanes import DPI, WIDTH_INCHES, draw_lanes, draw_legend, label_time, matplotlib_classes
from megatron_epp.report.palette import Shades
from megatron_epp.report.table import format_bytes, format_us

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT_INCHES = 9.0
"""Height of all lanes together, as long as lanes stay legible."""
_LANE_INCHES = (0.16, 0.3)


def side_by_side(plans: Sequence[tuple[str, Plan]]) -> Figure:
    """Draw plans one below the other, on a common time axis.

    Args:
        plans: name and plan.

    Raises:
        EppError: matplotlib is not installed.
        PlanError: there is nothing to draw, or an order deadlocks.
    """
    if not plans:
        raise PlanError("there is no plan to draw: no planner found one")
    figure_class, canvas_class = matplotlib_classes()
    lanes = [plan.num_ranks for _, plan in plans]
    least, most = _LANE_INCHES
    inches = max(least, min(most, _HEIGHT_INCHES / sum(lanes)))
    heights = [max(inches * count, 0.6) for count in lanes]
    size = WIDTH_INCHES, sum(heights) + 0.35 * len(plans) + 1.1
    figure: Figure = figure_class(figsize=size, dpi=DPI, layout="constrained")
    canvas_class(figure)
    axes = figure.subplots(len(plans), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest_us = max(plan.predicted.makespan_us for _, plan in plans) or 1.0
    axes[0].set_xlim(0.0, longest_us / 1e3)
    for axis, (name, plan) in zip(axes, plans, strict=True):
        draw_lanes(axis, plan, planned_boxes(simulate(plan)), Shades(plan), longest_us)
        axis.axvline(plan.predicted.makespan_us / 1e3, color="0.3", linewidth=0.8)
        axis.set_title(f"{name}: {_figures(plan)}", loc="left", fontsize=10)
    label_time(axes[-1], longest_us)
    first = plans[0][1]
    tokens = f"{len(first.lengths):,} sequences of {min(first.lengths):,} to {max(first.lengths):,} tokens"
    figure.suptitle(f"{tokens}, {first.num_stages} stages on {first.num_ranks} ranks, as planned", fontsize=11)
    draw_legend(figure, [plan for _, plan in plans], Shades.kinds())
    return figure


def _figures(plan: Plan) -> str:
    predicted = plan.predicted
    recompute = f", recompute {share:.1%}" if (share := facts.recompute_share(plan)) else ""
    peak = format_bytes(max(predicted.peak_bytes))
    return f"{format_us(predicted.makespan_us)}, bubble {predicted.bubble_fraction:.1%}{recompute}, peak {peak}"
