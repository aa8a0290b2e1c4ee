"""Pictures: a plan and a run of it with its memory, several plans below each other, and the memory of a plan by its items.

Colours are Okabe and Ito's (distinguishable with every kind of colour blindness). The hue shows the operation; the shade shows
whether a chunk holds whole short sequences (light) or a slice of a long one (dark).
matplotlib is imported only when a picture is drawn (``pip install "megatron-epp[viz]"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_epp.plan.action import Op
from megatron_epp.plan.boxes import COMPUTE, COPY, Box, far_from, measured_boxes, planned_boxes, recompute_in_backward
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.memory_breakdown import MemoryBreakdown
from megatron_epp.plan.operations import Track, operation, operations
from megatron_epp.plan.plan import Plan, is_unlimited
from megatron_epp.plan.plan_figures import is_calibrated, recompute_share
from megatron_epp.plan.reading import printable
from megatron_epp.plan.simulation import Timeline, simulate
from megatron_epp.plan.units import byte_unit, format_bytes
from megatron_epp.plan.writing import replacing
from megatron_epp.tools.report.text import batch_text, calibration, format_cap, format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CAP_IN_SIGHT = 3  # largest ratio of cap to peak for which the cap is drawn; a higher one would flatten the curves
_MEMORY_INCHES = 1.7
_RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7A00")
"""Colours of curves, one per rank; curves of more ranks have shades of one colour."""
_ALL_LANES_INCHES = 9.0  # height of all lanes together, as long as lanes stay legible
_LANE_INCHES = (0.16, 0.4)  # least and largest height of a lane
_WIDTH_INCHES = 15.0
_DPI = 150
_LANE = 0.84  # height of a rank's lane; the lanes are 1 apart
_COPY_LANE = 0.2
_TEXT_POINTS = (8.0, 5.0)
_MANY_SECONDS = 10  # seconds of an iteration from which its time axis is in seconds
_ROOMY_PIXELS = 10  # average width of a box, in pixels, above which white edges are distinguishable from bubbles
_WHOLE_STRENGTH, _SLICE_STRENGTH = 0.4, 1.0  # strength of the colours of chunks of whole sequences, and of chunks with a slice
_KINDS = {_SLICE_STRENGTH: "slice of a long sequence", _WHOLE_STRENGTH: "whole sequences"}
_STATIC = ("#114455", "#EEBB88", "#666633", "#99DDCC", "#663333", "#BBDDFF", "#443300", "#889955")
"""Colours of static items, in their order: dull ones, dark and light by turns."""
_VARYING = (
    *("#0072B2", "#56B4E9", "#003388", "#0099FF", "#009E73", "#F0E442", "#88FFBB"),
    *("#E69F00", "#D55E00", "#DDEE77", "#556666", "#CC79A7", "#224477"),
)
"""Colours of `MemoryBreakdown.order`. They and the static ones differ as Okabe and Ito's do, which are among them."""


class _Row(NamedTuple):
    title: str
    plan: Plan
    boxes: Sequence[Box]
    makespan_us: float


def gantt(plan: Plan, measured: Measured | None = None) -> Figure:
    """Draw the plan, the run and planned live bytes, on one time axis if near. Raises `EppError` without matplotlib."""
    timeline = simulate(plan)
    own_axes = measured is not None and far_from(plan, measured)
    planned = f"planned: makespan {format_us(timeline.makespan_us)}, bubble {timeline.bubble_fraction:.1%}{calibration(plan)}"
    rows = [_Row(planned, plan, planned_boxes(timeline), timeline.makespan_us)]
    if measured is not None:
        ratio = measured.makespan_us / timeline.makespan_us if timeline.makespan_us else 1.0
        took = f"measured: makespan {format_us(measured.makespan_us)}, bubble {measured.bubble_fraction:.1%}, "
        took += f"{ratio:.2f} times as planned{', on a time axis of its own' * own_axes}"
        rows.append(_Row(took, plan, measured_boxes(plan, measured), measured.makespan_us))
    title = f"{batch_text(plan)}, {len(plan.chunks)} chunks, {_pipeline(plan)}, planner {printable(plan.planner)}"
    figure, axes = _figure_of(rows, title, _MEMORY_INCHES, own_axes)
    _draw_memory(axes[-1], timeline)
    return figure


def _pipeline(plan: Plan) -> str:
    return f"{plan.num_stages} stages on {plan.num_ranks} ranks"


def save_gantt(plan: Plan, path: str | Path, measured: Measured | None = None) -> None:
    """Write `gantt` to a picture; the suffix selects the format (.png, .svg, .pdf). Raises the errors of `gantt`."""
    save_picture(gantt(plan, measured), path)


def save_picture(figure: Figure, path: str | Path) -> None:
    """Write a figure to a picture, whole or not at all; the suffix selects the format. Raises OSError."""
    with replacing(path) as scratch:
        figure.savefig(scratch)


def side_by_side(plans: Sequence[tuple[str, Plan]]) -> Figure:
    """Draw plans one below the other, on a common time axis. Raises the errors of `gantt`, and `PlanError` for no plan."""
    if not plans:
        raise PlanError("there is no plan to draw: no planner found one")
    pipelines, rows = [_pipeline(plan) for _, plan in plans], []
    differ = len(set(pipelines)) > 1
    for (name, plan), pipeline in zip(plans, pipelines, strict=True):
        predicted, share = plan.predicted, recompute_share(plan)
        figures = [f"{name}: {format_us(predicted.makespan_us)}", f"bubble {predicted.bubble_fraction:.1%}"]
        figures += [f"recompute {share:.1%}"] * (share > 0)
        title = ", ".join([*figures, f"peak {format_bytes(max(predicted.peak_bytes))}", *[pipeline] * differ])
        rows.append(_Row(title, plan, planned_boxes(simulate(plan)), predicted.makespan_us))
    planned = "as planned" if any(is_calibrated(plan) for _, plan in plans) else f"as planned{calibration(plans[0][1])}"
    title = ", ".join([batch_text(plans[0][1]), *pipelines[: not differ], planned])
    return _figure_of(rows, title)[0]


def _figure_of(
    rows: Sequence[_Row], title: str, below_inches: float = 0.0, own_axes: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    """Draw iterations below each other, with a further axis of the first one's time below them if it has a height."""
    least, most = _LANE_INCHES
    lane_inches = max(least, min(most, _ALL_LANES_INCHES / sum(row.plan.num_ranks for row in rows)))
    heights = [max(lane_inches * row.plan.num_ranks, 0.6) for row in rows] + [below_inches] * (below_inches > 0)
    figure, axes = _new_figure(sum(heights) + 0.35 * len(heights) + 1.1, len(heights), height_ratios=heights)
    longest_us = max(row.makespan_us for row in rows) or 1.0
    for number, (axis, row) in enumerate(zip(axes, [*rows, rows[0]], strict=False)):
        length_us = row.makespan_us or 1.0 if own_axes else longest_us
        axis.set_xlim(0.0, length_us / 1e3)
        if own_axes or axis is axes[-1]:
            _label_time(axis, length_us)
        else:
            axis.tick_params(axis="x", labelbottom=False)
        if number < len(rows):
            _draw_lanes(axis, row.plan, row.boxes, length_us)
            axis.set_title(row.title, loc="left", fontsize=10, parse_math=False)
            axis.axvline(row.makespan_us / 1e3, color="0.3", linewidth=0.8)
    figure.suptitle(title, fontsize=11, parse_math=False)
    _draw_legend(figure, [row.plan for row in rows])
    return figure, axes


def _new_figure(height_inches: float, num_axes: int, **layout: Any) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure with axes below each other. Raises `EppError` if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EppError('pictures need matplotlib; install it with: pip install "megatron-epp[viz]"') from error
    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(num_axes, 1, squeeze=False, **layout)[:, 0]


def _draw_caps(axes: Sequence[Axes], caps: Sequence[int], peak: int, size: int) -> str:
    """Draw dashed caps, one per axis, unless far above the peak, scale axes to units of `size` bytes; return a note."""
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
    plan, peak, ranks, lines = timeline.plan, max(timeline.peak_bytes), timeline.plan.num_ranks, []
    (size, unit), few = byte_unit(peak), ranks <= len(_RANK_COLOURS)
    named = range(ranks) if few else (0, ranks // 2, ranks - 1)
    for rank in range(ranks):
        # Of several changes at one instant (to the nanosecond), releases come first: the last value is valid.
        live = {round(time_us, 3): num_bytes for time_us, num_bytes in timeline.live_bytes(rank)}
        times_ms, heights = [time_us / 1e3 for time_us in live], [num_bytes / size for num_bytes in live.values()]
        colour = _RANK_COLOURS[rank] if few else _tint("#0B1F3A", 0.2 + 0.8 * (1 - rank / ranks))
        lines += axis.step(times_ms, heights, where="post", linewidth=1.2, color=colour, label=f"_rank {rank}")
    caps = sorted(set(plan.cap_bytes))
    note = _draw_caps([axis] * len(caps), caps, peak, size)
    axis.set_title(f"planned live bytes ({note})", loc="left", fontsize=10)
    axis.set_ylabel(unit, fontsize=9)
    handles, labels = [lines[rank] for rank in named], [f"rank {rank}" for rank in named]
    axis.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(named), fontsize=9, frameon=False)


def _draw_lanes(axis: Axes, plan: Plan, boxes: Sequence[Box], longest_us: float) -> None:
    """Draw bars per rank and stream, chunk numbers in wide boxes, and recompute at the beginning of its backward."""
    recompute, strengths = recompute_in_backward(plan), strengths_of(plan)
    pixels_per_us = _WIDTH_INCHES * _DPI * 0.93 / longest_us
    edge = 0.4 if pixels_per_us * sum(box.end_us - box.start_us for box in boxes) > _ROOMY_PIXELS * len(boxes) else 0.0
    copies = any(box.stream == COPY for box in boxes)
    lane = _LANE - (_COPY_LANE if copies else 0.0)
    for rank in range(plan.num_ranks):
        top = rank - _LANE / 2
        compute = [box for box in boxes if box.rank == rank and box.stream == COMPUTE]
        shades = [_tint(operation(box.action.op).colour, strengths[box.action.chunk]) for box in compute]
        _bars(axis, compute, shades, (top, lane), f"rank {rank} {COMPUTE}", edge)
        again_us = [recompute.get(box.action, 0.0) * (box.end_us - box.start_us) for box in compute]
        timed = [*zip(compute, again_us, strict=True)]
        fronts = [box._replace(end_us=box.start_us + time_us) for box, time_us in timed if time_us]
        _bars(axis, fronts, [operation(Op.R).colour] * len(fronts), (top, lane), f"rank {rank} recompute", edge)
        for (box, time_us), shade in zip(timed, shades, strict=True):
            _number(axis, plan, box._replace(start_us=box.start_us + time_us), shade, top + lane / 2, pixels_per_us)
        if copies:
            moved = [box for box in boxes if box.rank == rank and box.stream == COPY]
            colours = [operation(box.action.op).colour for box in moved]
            _bars(axis, moved, colours, (top + lane, _COPY_LANE), f"rank {rank} {COPY}", edge)
    axis.set_ylim(plan.num_ranks - 0.45, -0.55)
    axis.set_yticks(range(plan.num_ranks), [f"rank {rank}" for rank in range(plan.num_ranks)])
    axis.tick_params(axis="y", length=0, labelsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _bars(axis: Axes, boxes: Sequence[Box], colours: Sequence[str], lane: tuple[float, float], label: str, edge: float) -> None:
    spans = [(box.start_us / 1e3, (box.end_us - box.start_us) / 1e3) for box in boxes]
    axis.broken_barh(spans, lane, facecolors=list(colours), edgecolor="white", linewidth=edge, label=f"_{label}")


def _number(axis: Axes, plan: Plan, box: Box, colour: str, y: float, pixels_per_us: float) -> None:
    """Write the chunk (and the stage, if a rank has several) in a box, as large as fits, or not at all."""
    one_stage = plan.num_stages == plan.num_ranks
    label = "+".join(str(chunk) if one_stage else f"{stage}.{chunk}" for _, stage, chunk in box.actions)
    width_points = (box.end_us - box.start_us) * pixels_per_us * 72 / _DPI
    size = next((size for size in _TEXT_POINTS if width_points >= 0.68 * size * len(label)), None)
    if size is not None:
        middle_ms, (red, green, blue) = (box.start_us + box.end_us) / 2e3, _channels_of(colour)
        contrast = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
        axis.text(middle_ms, y, label, ha="center", va="center", fontsize=size, color=contrast, clip_on=True)


def _label_time(axis: Axes, longest_us: float) -> None:
    in_seconds = longest_us >= _MANY_SECONDS * 1e6
    if in_seconds:
        axis.xaxis.set_major_formatter(lambda time_ms, _: f"{time_ms / 1e3:g}")
    axis.set_xlabel(f"{'s' if in_seconds else 'ms'} since the start of the iteration")


def _draw_legend(figure: Figure, plans: Sequence[Plan]) -> None:
    present = {a.op for plan in plans for _, table in plan.tables for row in table for step in row for a in step.actions}
    kinds = sorted({strength for plan in plans for strength in strengths_of(plan)}, reverse=True)
    entries = []
    for kind in operations():
        if kind.op in present:
            shaded = [(_tint(kind.colour, strength), f"{kind.text}, {_KINDS[strength]}") for strength in kinds]
            is_shaded = kind.track is Track.COMPUTE and len(kinds) > 1
            entries += shaded if is_shaded else [(kind.colour, kind.text)]
    if any(map(recompute_in_backward, plans)):
        entries.append((operation(Op.R).colour, "recompute inside a backward"))
    _draw_entries(figure, entries, len(entries) if len(entries) < 6 else 4)


def _draw_entries(figure: Figure, entries: Iterable[tuple[str, str]], num_columns: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for colour, name in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, fontsize=9, frameon=False)


def strengths_of(plan: Plan) -> list[float]:
    """Strength of the colour of every chunk's actions: the hue is by operation, the strength by the kind of chunk."""
    return [_WHOLE_STRENGTH if chunk.slice_of(plan.lengths) is None else _SLICE_STRENGTH for chunk in plan.chunks]


def _tint(colour: str, strength: float) -> str:
    """Mix ``#RRGGBB`` with white: strength 1 is the colour itself, 0 is white."""
    return "#" + "".join(f"{round(255 - strength * (255 - value)):02X}" for value in _channels_of(colour))


def _channels_of(colour: str) -> bytes:
    return bytes.fromhex(colour[1:])


def item_colours(breakdown: MemoryBreakdown) -> dict[str, str]:
    """Colours ``#RRGGBB`` of all items that any rank ever has, from the bottom of a picture to its top."""
    static = [name for name in breakdown.items if name in breakdown.static[0]]
    colours = dict(zip(static, _STATIC, strict=False)) | dict(zip(breakdown.order, _VARYING, strict=False))
    return {name: colours.get(name, "#000000") for name in breakdown.items}  # black: items beyond these


def memory_picture(breakdown: MemoryBreakdown) -> Figure:
    """Draw the items of every rank as stacked areas over time. Raises `EppError` if matplotlib is not installed."""
    plan, timeline = breakdown.timeline.plan, breakdown.timeline
    height_inches = plan.num_ranks * min(2.6, max(1.3, 9.0 / plan.num_ranks)) + 1.8
    figure, axes = _new_figure(height_inches, plan.num_ranks, sharex=True, sharey=True)
    colours, peak = item_colours(breakdown), max(timeline.peak_bytes)
    size, unit = byte_unit(peak)
    labels = [f"_{name}" for name in colours]
    for rank, axis in enumerate(axes):  # areas, the first at the bottom
        moments = {round(moment.time_us, 3): moment.items for moment in breakdown.moments(rank)}
        times_ms = [*(time_us / 1e3 for time_us in moments), timeline.makespan_us / 1e3]
        items = [*moments.values(), *[*moments.values()][-1:]]
        heights = [[entry.get(name, 0) / size for entry in items] for name in colours]
        axis.stackplot(times_ms, heights, labels=labels, colors=[*colours.values()], step="post", linewidth=0)
        axis.set_ylabel(f"rank {rank}\n{unit}", fontsize=9)
    note = _draw_caps(axes, plan.cap_bytes, peak, size)
    axes[0].set_xlim(0.0, timeline.makespan_us / 1e3 or 1.0)
    _label_time(axes[-1], timeline.makespan_us)
    axes[0].set_title(f"planned memory of {len(plan.lengths):,} sequences in {len(plan.chunks)} chunks ({note})", loc="left")
    _draw_entries(figure, [(colour, name) for name, colour in colours.items()], min(4, len(colours)))
    return figure
