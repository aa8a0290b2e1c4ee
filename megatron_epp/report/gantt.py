"""A picture of one iteration: every rank's actions, planned and measured, and memory against the cap.

Colours are Okabe and Ito's (distinguishable with every kind of colour blindness). The hue shows the operation; the shade shows
whether a chunk holds whole short sequences (light) or a slice of a long one (dark, one shade per sequence).
matplotlib is imported only when a picture is drawn (``pip install "megatron-epp[viz]"``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulate import Timeline, simulate
from megatron_epp.report.boxes import measured_boxes, planned_boxes
from megatron_epp.report.lanes import DPI, WIDTH_INCHES, draw_lanes, draw_legend, label_time, lane_inches, matplotlib_classes
from megatron_epp.report.measured import Measured
from megatron_epp.report.palette import Shades, tint
from megatron_epp.report.table import byte_unit, format_cap, format_us, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CAP_IN_SIGHT = 3
"""Largest ratio of cap to peak for which the cap is drawn; a higher one would flatten the curves."""


def gantt(plan: Plan, measured: Measured | None = None, memory: bool = True) -> Figure:
    """Draw the plan on top, the run below when given, then live bytes per rank; all on one time axis in ms.

    Args:
        plan: the plan; it is simulated.
        measured: a run of this plan.
        memory: draw the planned live bytes of every rank against the cap.

    Raises:
        EppError: matplotlib is not installed.
        PlanError: the order deadlocks, or the measurement is of another plan.
    """
    figure_class, canvas_class = matplotlib_classes()
    timeline = simulate(plan)
    rows = [("planned", planned_boxes(timeline), timeline.makespan_us, timeline.bubble_fraction)]
    if measured is not None:
        rows.append(("measured", measured_boxes(plan, measured), measured.makespan_us, measured.bubble_fraction))
    heights = [max(plan.num_ranks * lane_inches(plan.num_ranks), 0.8)] * len(rows) + [1.7] * memory
    figure: Figure = figure_class(
        figsize=(WIDTH_INCHES, sum(heights) + 0.35 * len(heights) + 1.1), dpi=DPI, layout="constrained"
    )
    canvas_class(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest_us = max(makespan_us for _, _, makespan_us, _ in rows) or 1.0
    axes[0].set_xlim(0.0, longest_us / 1e3)
    shades = Shades(plan)
    for axis, (name, boxes, makespan_us, bubble) in zip(axes, rows, strict=False):
        draw_lanes(axis, plan, boxes, shades, longest_us)
        axis.set_title(f"{name}: makespan {format_us(makespan_us)}, bubble {bubble:.1%}", loc="left", fontsize=10)
        axis.axvline(makespan_us / 1e3, color="0.3", linewidth=0.8)
    if memory:
        _draw_memory(axes[-1], timeline)
    label_time(axes[-1], longest_us)
    figure.suptitle(_title(plan), fontsize=11, parse_math=False)
    draw_legend(figure, [plan], shades.legend())
    return figure


def save_gantt(plan: Plan, path: str | Path, measured: Measured | None = None) -> None:
    """Write `gantt` to a picture; the suffix selects the format (.png, .svg, .pdf). Raises the errors of `gantt`."""
    gantt(plan, measured).savefig(path)


def _title(plan: Plan) -> str:
    return (
        f"{len(plan.lengths):,} sequences of {min(plan.lengths):,} to {max(plan.lengths):,} tokens, "
        f"{len(plan.chunks)} chunks, {plan.num_stages} stages on {plan.num_ranks} ranks, planner {printable(plan.planner)}"
    )


def _draw_memory(axis: Axes, timeline: Timeline) -> None:
    """Draw live bytes of every rank as steps, and the cap as a dashed line, or as a note if it is far above."""
    plan = timeline.plan
    peak, caps = max(timeline.peak_bytes), sorted(set(plan.cap_bytes))
    size, unit = byte_unit(peak)
    for rank in range(plan.num_ranks):
        # Of several changes at one instant (to the nanosecond), releases come first: the last level is valid.
        levels = {round(time_us, 3): num_bytes for time_us, num_bytes in timeline.live_bytes(rank)}
        colour = tint("#0B1F3A", 0.2 + 0.8 * (1 - rank / plan.num_ranks))
        times_ms, heights = [time_us / 1e3 for time_us in levels], [num_bytes / size for num_bytes in levels.values()]
        axis.step(times_ms, heights, where="post", linewidth=1.0, color=colour, label=f"_rank {rank}")
    shown = [cap for cap in caps if cap <= _CAP_IN_SIGHT * peak]
    for cap in shown:
        axis.axhline(cap / size, color="0.25", linestyle=(0, (6, 3)), linewidth=1.2, label="_cap")
    axis.set_ylim(0.0, max([peak, *shown]) / size * 1.08)
    ranks = f"rank 0 dark to rank {plan.num_ranks - 1} light, " if plan.num_ranks > 1 else ""
    note = "dashed: cap" if shown else f"cap {format_cap(caps[0])}, not drawn"
    axis.set_title(f"planned live bytes ({ranks}{note})", loc="left", fontsize=10)
    axis.set_ylabel(unit, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
