"""A picture of one iteration: every rank's actions as planned, the same as measured, and memory against the cap.

Colours are Okabe and Ito's (distinguishable with every kind of colour blindness). The hue tells the operation; the shade tells
whether a chunk holds whole short sequences (light) or a slice of a long one (dark, one shade per sequence).
matplotlib is imported only when a picture is drawn (``pip install "megatron-epp[viz]"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_epp.report.boxes import COMPUTE, COPY, Box, measured_boxes, planned_boxes
from megatron_epp.report.facts import recompute_in_backward
from megatron_epp.report.measured import Measured
from megatron_epp.report.palette import COLOURS, OP_NAMES, Shades, text_colour, tint
from megatron_epp.report.table import byte_unit, format_cap, format_us
from megatron_epp.schedule.action import Op
from megatron_epp.schedule.errors import EppError
from megatron_epp.schedule.plan import Plan
from megatron_epp.schedule.simulate import Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 15.0
_DPI = 150
_LANE = 0.84
"""Height of a rank's lane; the lanes are 1 apart."""
_COPY_LANE = 0.2
_TEXT_POINTS = (8.0, 5.0)
_ROOMY_PIXELS = 10
"""Average width of a box from which white edges between boxes do not pass for bubbles."""
_CAP_IN_SIGHT = 3
"""The cap is drawn when it is at most this many times the peak: further up it would press the curves flat."""


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
    lane_inches = min(0.45, max(0.26, 3.6 / plan.num_ranks))
    heights = [max(plan.num_ranks * lane_inches, 0.8)] * len(rows) + [1.7] * memory
    figure: Figure = figure_class(
        figsize=(_WIDTH_INCHES, sum(heights) + 0.35 * len(heights) + 1.1), dpi=_DPI, layout="constrained"
    )
    canvas_class(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest_us = max(makespan_us for _, _, makespan_us, _ in rows) or 1.0
    axes[0].set_xlim(0.0, longest_us / 1e3)
    shades = Shades(plan)
    for axis, (name, boxes, makespan_us, bubble) in zip(axes, rows, strict=False):
        _draw_boxes(axis, plan, boxes, shades, longest_us)
        axis.set_title(f"{name}: makespan {format_us(makespan_us)}, bubble {bubble:.1%}", loc="left", fontsize=10)
        axis.axvline(makespan_us / 1e3, color="0.3", linewidth=0.8)
    if memory:
        _draw_memory(axes[-1], timeline)
    axes[-1].set_xlabel("ms since the start of the iteration")
    figure.suptitle(_title(plan), fontsize=11)
    _legend(figure, plan, rows[0][1], shades)
    return figure


def save_gantt(plan: Plan, path: str | Path, measured: Measured | None = None) -> None:
    """Write `gantt` to a picture; the suffix picks the format (.png, .svg, .pdf). Raises as it does."""
    gantt(plan, measured).savefig(path)


def matplotlib_classes() -> tuple[Any, Any]:
    """Matplotlib's figure and canvas. Raises `EppError` where it is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EppError('pictures need matplotlib; install it with: pip install "megatron-epp[viz]"') from error
    return Figure, FigureCanvasAgg


def _title(plan: Plan) -> str:
    return (
        f"{len(plan.lengths):,} sequences of {min(plan.lengths):,} to {max(plan.lengths):,} tokens, "
        f"{len(plan.chunks)} chunks, {plan.num_stages} stages on {plan.num_ranks} ranks, planner {plan.planner}"
    )


def _draw_boxes(axis: Axes, plan: Plan, boxes: Sequence[Box], shades: Shades, longest_us: float) -> None:
    """One collection of bars per rank and stream, chunk numbers where they fit, recompute at the front of its backward."""
    recompute = recompute_in_backward(plan)
    pixels_per_us = _WIDTH_INCHES * _DPI * 0.93 / longest_us
    edge = 0.4 if pixels_per_us * longest_us * plan.num_ranks > _ROOMY_PIXELS * len(boxes) else 0.0
    copies = any(box.stream == COPY for box in boxes)
    lane = _LANE - (_COPY_LANE if copies else 0.0)
    for rank in range(plan.num_ranks):
        top = rank - _LANE / 2
        compute = [box for box in boxes if box.rank == rank and box.stream == COMPUTE]
        _bars(axis, compute, [shades.colour(box.action) for box in compute], (top, lane), f"rank {rank} {COMPUTE}", edge)
        fronts = [_front(box, recompute[box.action]) for box in compute if box.action in recompute]
        _bars(axis, fronts, [COLOURS[Op.R]] * len(fronts), (top, lane), f"rank {rank} recompute", edge)
        covered = {front.action: front.end_us for front in fronts}
        for box in compute:
            free = box._replace(start_us=covered.get(box.action, box.start_us))
            _number(axis, plan, free, shades.colour(box.action), top + lane / 2, pixels_per_us)
        if copies:
            moved = [box for box in boxes if box.rank == rank and box.stream == COPY]
            _bars(axis, moved, [COLOURS[box.action.op] for box in moved], (top + lane, _COPY_LANE), f"rank {rank} {COPY}", edge)
    axis.set_ylim(plan.num_ranks - 0.45, -0.55)
    axis.set_yticks(range(plan.num_ranks), [f"rank {rank}" for rank in range(plan.num_ranks)])
    axis.tick_params(axis="y", length=0, labelsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _bars(axis: Axes, boxes: Sequence[Box], colours: Sequence[str], lane: tuple[float, float], label: str, edge: float) -> None:
    spans = [(box.start_us / 1e3, (box.end_us - box.start_us) / 1e3) for box in boxes]
    axis.broken_barh(spans, lane, facecolors=list(colours), edgecolor="white", linewidth=edge, label=f"_{label}")


def _front(box: Box, share: float) -> Box:
    return box._replace(end_us=box.start_us + share * (box.end_us - box.start_us))


def _number(axis: Axes, plan: Plan, box: Box, colour: str, y: float, pixels_per_us: float) -> None:
    """Write the chunk (and the stage, where a rank has several) in a box, as large as fits, or not at all."""
    label = str(box.action.chunk) if plan.num_stages == plan.num_ranks else f"{box.action.stage}.{box.action.chunk}"
    width_points = (box.end_us - box.start_us) * pixels_per_us * 72 / _DPI
    size = next((size for size in _TEXT_POINTS if width_points >= 0.68 * size * len(label)), None)
    if size is not None:
        middle_ms = (box.start_us + box.end_us) / 2e3
        axis.text(middle_ms, y, label, ha="center", va="center", fontsize=size, color=text_colour(colour), clip_on=True)


def _draw_memory(axis: Axes, timeline: Timeline) -> None:
    """Live bytes of every rank as steps; the cap as a dashed line, or as a note where it is far above."""
    plan = timeline.plan
    peak, caps = max(timeline.peak_bytes), sorted(set(plan.cap_bytes))
    size, unit = byte_unit(peak)
    for rank in range(plan.num_ranks):
        # At one instant (to the nanosecond) what is freed makes room first: the last level is the one that holds.
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


def _legend(figure: Figure, plan: Plan, boxes: Sequence[Box], shades: Shades) -> None:
    from matplotlib.patches import Patch

    present = {box.action.op for box in boxes}
    entries = [(COLOURS[op], name) for op, name in OP_NAMES.items() if op in present]
    if recompute_in_backward(plan):
        entries.append((COLOURS[Op.R], "recompute inside a backward"))
    entries += shades.legend()
    handles = [Patch(facecolor=colour, label=name) for colour, name in entries]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles) if len(handles) < 6 else 4, fontsize=9, frameon=False
    )
