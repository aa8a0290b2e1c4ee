"""Pictures of iterations: a plan and a run of it with its memory, or several plans below each other.

Colours are Okabe and Ito's (distinguishable with every kind of colour blindness). The hue shows the operation; the shade shows
whether a chunk holds whole short sequences (light) or a slice of a long one (dark, one shade per sequence).
matplotlib is imported only when a picture is drawn (``pip install "megatron-epp[viz]"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.plan import Plan, is_unlimited
from megatron_epp.plan.reading import printable
from megatron_epp.plan.simulate import Timeline, simulate
from megatron_epp.plan.units import byte_unit, format_bytes
from megatron_epp.plan.writing import replacing
from megatron_epp.report import facts
from megatron_epp.report.lanes import DPI, WIDTH_INCHES, draw_lanes, draw_legend, label_time, tint
from megatron_epp.report.measured import Box, Measured, far_from, measured_boxes, planned_boxes
from megatron_epp.report.table import format_cap, format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CAP_IN_SIGHT = 3
"""Largest ratio of cap to peak for which the cap is drawn; a higher one would flatten the curves."""
_MEMORY_INCHES = 1.7
_RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7A00")
"""Colours of curves, one per rank; curves of more ranks have shades of one colour."""
_ALL_LANES_INCHES = 9.0
"""Height of the lanes of several plans together, as long as lanes stay legible."""
_LANE_INCHES = (0.16, 0.3)
"""Least and largest height of a lane of several plans."""


class _Row(NamedTuple):
    """An iteration to draw: a plan as simulated, or a run of it."""

    title: str
    plan: Plan
    boxes: Sequence[Box]
    makespan_us: float
    height_inches: float


def gantt(plan: Plan, measured: Measured | None = None) -> Figure:
    """Draw the plan on top, the run below when given, then planned live bytes per rank.

    All are on one time axis, unless the run took more than twice as long as planned, or less than half.

    Raises:
        EppError: matplotlib is not installed.
        PlanError: the order deadlocks, or the measurement is of another plan.
    """
    timeline = simulate(plan)
    height = max(plan.num_ranks * min(0.45, max(0.26, 3.6 / plan.num_ranks)), 0.8)
    figures = f"makespan {format_us(timeline.makespan_us)}, bubble {timeline.bubble_fraction:.1%}"
    rows = [_Row(f"planned: {figures}{facts.calibration(plan)}", plan, planned_boxes(timeline), timeline.makespan_us, height)]
    if measured is not None:
        rows.append(
            _Row(_measured_title(timeline, measured), plan, measured_boxes(plan, measured), measured.makespan_us, height)
        )
    title = (
        f"{facts.batch_text(plan)}, {len(plan.chunks)} chunks, {plan.num_stages} stages on {plan.num_ranks} ranks, "
        f"planner {printable(plan.planner)}"
    )
    own_axes = measured is not None and far_from(plan, measured)
    figure, axes = _figure_of(rows, title, [_MEMORY_INCHES], own_axes)
    _draw_memory(axes[-1], timeline)
    return figure


def _measured_title(timeline: Timeline, measured: Measured) -> str:
    figures = f"makespan {format_us(measured.makespan_us)}, bubble {measured.bubble_fraction:.1%}"
    ratio = measured.makespan_us / timeline.makespan_us if timeline.makespan_us else 1.0
    own_axis = ", on a time axis of its own" if far_from(timeline.plan, measured) else ""
    return f"measured: {figures}, {ratio:.2f} times as planned{own_axis}"


def save_gantt(plan: Plan, path: str | Path, measured: Measured | None = None) -> None:
    """Write `gantt` to a picture; the suffix selects the format (.png, .svg, .pdf). Raises the errors of `gantt`."""
    save_picture(gantt(plan, measured), path)


def save_picture(figure: Figure, path: str | Path) -> None:
    """Write a figure to a picture, whole or not at all; the suffix selects the format. Raises OSError."""
    with replacing(path) as scratch:
        figure.savefig(scratch)


def side_by_side(plans: Sequence[tuple[str, Plan]]) -> Figure:
    """Draw plans one below the other, on a common time axis.

    Raises:
        EppError: matplotlib is not installed.
        PlanError: there is nothing to draw, or an order deadlocks.
    """
    if not plans:
        raise PlanError("there is no plan to draw: no planner found one")
    least, most = _LANE_INCHES
    inches = max(least, min(most, _ALL_LANES_INCHES / sum(plan.num_ranks for _, plan in plans)))
    pipelines, rows = [f"{plan.num_stages} stages on {plan.num_ranks} ranks" for _, plan in plans], []
    differ = len(set(pipelines)) > 1
    for (name, plan), pipeline in zip(plans, pipelines, strict=True):
        predicted, share = plan.predicted, facts.recompute_share(plan)
        figures = [f"{name}: {format_us(predicted.makespan_us)}", f"bubble {predicted.bubble_fraction:.1%}"]
        figures += [f"recompute {share:.1%}"] * (share > 0)
        title = ", ".join([*figures, f"peak {format_bytes(max(predicted.peak_bytes))}", *[pipeline] * differ])
        height = max(inches * plan.num_ranks, 0.6)
        rows.append(_Row(title, plan, planned_boxes(simulate(plan)), predicted.makespan_us, height))
    formula = all(not facts.is_calibrated(plan) for _, plan in plans)
    planned = f"as planned{facts.calibration(plans[0][1])}" if formula else "as planned"
    title = ", ".join([facts.batch_text(plans[0][1]), *pipelines[: not differ], planned])
    return _figure_of(rows, title)[0]


def _figure_of(
    rows: Sequence[_Row], title: str, more_inches: Sequence[float] = (), own_axes: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    """Draw iterations below each other, and leave room for more axes below them.

    Args:
        more_inches: height of each further axis, which shows the first iteration.
        own_axes: each iteration has a time axis of its own.
    """
    heights = [*(row.height_inches for row in rows), *more_inches]
    size_inches = WIDTH_INCHES, sum(heights) + 0.35 * len(heights) + 1.1
    figure, axes = new_figure(size_inches, DPI, len(heights), sharex=False, height_ratios=heights)
    longest_us = max(row.makespan_us for row in rows) or 1.0
    for axis, row in zip(axes, [*rows, *[rows[0]] * len(more_inches)], strict=True):
        length_us = row.makespan_us or 1.0 if own_axes else longest_us
        axis.set_xlim(0.0, length_us / 1e3)
        if own_axes or axis is axes[-1]:
            label_time(axis, length_us)
    for axis, row in zip(axes, rows, strict=False):
        draw_lanes(axis, row.plan, row.boxes, row.makespan_us or 1.0 if own_axes else longest_us)
        axis.set_title(row.title, loc="left", fontsize=10, parse_math=False)
        axis.axvline(row.makespan_us / 1e3, color="0.3", linewidth=0.8)
        axis.tick_params(axis="x", labelbottom=own_axes)
    axes[-1].tick_params(axis="x", labelbottom=True)
    figure.suptitle(title, fontsize=11, parse_math=False)
    draw_legend(figure, [row.plan for row in rows])
    return figure, axes


def new_figure(size_inches: tuple[float, float], dpi: int, num_axes: int, **layout: Any) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure with axes below each other that share the time axis, unless `layout` says otherwise.

    Raises `EppError` if matplotlib is not installed.

    Args:
        dpi: pixels per inch.
        layout: further arguments of matplotlib's `Figure.subplots`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EppError('pictures need matplotlib; install it with: pip install "megatron-epp[viz]"') from error
    figure = Figure(figsize=size_inches, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Sequence[Axes] = figure.subplots(num_axes, 1, squeeze=False, **{"sharex": True, **layout})[:, 0]
    return figure, axes


def draw_caps(axes: Sequence[Axes], caps: Sequence[int], peak: int, size: int) -> str:
    """Draw a cap as a dashed line on each axis unless it is far above the peak, scale the axes, and return a note about caps.

    Args:
        axes: one for each cap; their unit is `size` bytes.
        caps: memory caps in bytes.
        peak: highest peak in bytes.
        size: bytes of the axes' unit.
    """
    shown = [cap for cap in caps if cap <= _CAP_IN_SIGHT * peak]
    for axis, cap in zip(axes, caps, strict=True):
        if cap in shown:
            axis.axhline(cap / size, color="0.15", linestyle=(0, (6, 3)), linewidth=1.2, label="_cap")
        axis.set_ylim(0.0, max([peak, *shown]) / size * 1.08)
        axis.spines[["top", "right"]].set_visible(False)
    if shown:
        return "dashed: cap"
    return "no cap" if all(map(is_unlimited, caps)) else f"cap {format_cap(min(caps))}, not drawn"


def _draw_memory(axis: Axes, timeline: Timeline) -> None:
    """Draw live bytes of every rank as steps, and the caps."""
    plan, peak = timeline.plan, max(timeline.peak_bytes)
    size, unit = byte_unit(peak)
    lines = []
    for rank in range(plan.num_ranks):
        # Of several changes at one instant (to the nanosecond), releases come first: the last value is valid.
        live = {round(time_us, 3): num_bytes for time_us, num_bytes in timeline.live_bytes(rank)}
        times_ms, heights = [time_us / 1e3 for time_us in live], [num_bytes / size for num_bytes in live.values()]
        colour = _rank_colour(rank, plan.num_ranks)
        lines += axis.step(times_ms, heights, where="post", linewidth=1.2, color=colour, label=f"_rank {rank}")
    caps = sorted(set(plan.cap_bytes))
    note = draw_caps([axis] * len(caps), caps, peak, size)
    axis.set_title(f"planned live bytes ({note})", loc="left", fontsize=10)
    axis.set_ylabel(unit, fontsize=9)
    shown = range(plan.num_ranks) if plan.num_ranks <= len(_RANK_COLOURS) else (0, plan.num_ranks // 2, plan.num_ranks - 1)
    axis.legend(
        [lines[rank] for rank in shown],
        [f"rank {rank}" for rank in shown],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(shown),
        fontsize=9,
        frameon=False,
    )


def _rank_colour(rank: int, num_ranks: int) -> str:
    return _RANK_COLOURS[rank] if num_ranks <= len(_RANK_COLOURS) else tint("#0B1F3A", 0.2 + 0.8 * (1 - rank / num_ranks))
