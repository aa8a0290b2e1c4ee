"""Lanes of boxes, one per rank, as all pictures of plans and runs draw them, and their shades."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.operations import Track, operation, operations
from megatron_epp.plan.plan import Plan
from megatron_epp.report.facts import recompute_in_backward
from megatron_epp.report.measured import COMPUTE, COPY, Box

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 15.0
DPI = 150
_LANE = 0.84
"""Height of a rank's lane; the lanes are 1 apart."""
_COPY_LANE = 0.2
_TEXT_POINTS = (8.0, 5.0)
_MANY_SECONDS = 10
"""Seconds of an iteration from which its time axis is in seconds."""
_ROOMY_PIXELS = 10
"""Average width of a box, in pixels, above which white edges are distinguishable from bubbles."""


_BATCHED = 0.4
"""Strength of the colour of chunks of whole sequences."""
_SLICED = (1.0, 0.8, 0.9)
"""Strengths of the colours of chunks with slices, used in turn for the long sequences."""
_ODD = 0.86
"""Factor of the strength for odd chunks, which distinguishes neighbours if there is no room for edges."""


def draw_lanes(axis: Axes, plan: Plan, boxes: Sequence[Box], longest_us: float) -> None:
    """Draw bars per rank and stream, chunk numbers in wide boxes, and recompute at the beginning of its backward."""
    recompute, shades = recompute_in_backward(plan), Shades(plan)
    pixels_per_us = WIDTH_INCHES * DPI * 0.93 / longest_us
    edge = 0.4 if pixels_per_us * sum(box.end_us - box.start_us for box in boxes) > _ROOMY_PIXELS * len(boxes) else 0.0
    copies = any(box.stream == COPY for box in boxes)
    lane = _LANE - (_COPY_LANE if copies else 0.0)
    for rank in range(plan.num_ranks):
        top = rank - _LANE / 2
        compute = [box for box in boxes if box.rank == rank and box.stream == COMPUTE]
        _bars(axis, compute, [shades.colour(box.action) for box in compute], (top, lane), f"rank {rank} {COMPUTE}", edge)
        fronts = [
            box._replace(end_us=box.start_us + recompute[box.action] * (box.end_us - box.start_us))
            for box in compute
            if box.action in recompute
        ]
        _bars(axis, fronts, [operation(Op.R).colour] * len(fronts), (top, lane), f"rank {rank} recompute", edge)
        covered = {front.action: front.end_us for front in fronts}
        for box in compute:
            free = box._replace(start_us=covered.get(box.action, box.start_us))
            _number(axis, plan, free, shades.colour(box.action), top + lane / 2, pixels_per_us)
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
    width_points = (box.end_us - box.start_us) * pixels_per_us * 72 / DPI
    size = next((size for size in _TEXT_POINTS if width_points >= 0.68 * size * len(label)), None)
    if size is not None:
        middle_ms = (box.start_us + box.end_us) / 2e3
        axis.text(middle_ms, y, label, ha="center", va="center", fontsize=size, color=text_colour(colour), clip_on=True)


def label_time(axis: Axes, longest_us: float) -> None:
    """Label the time axis: ms, or s for an iteration of many seconds."""
    unit = "ms"
    if longest_us >= _MANY_SECONDS * 1e6:
        unit = "s"
        axis.xaxis.set_major_formatter(lambda time_ms, _: f"{time_ms / 1e3:g}")
    axis.set_xlabel(f"{unit} since the start of the iteration")


def draw_legend(figure: Figure, plans: Sequence[Plan]) -> None:
    """Draw the legend below a picture of lanes: the operations of the plans, in the colours of their boxes."""
    steps = [step for plan in plans for _, table in plan.tables for row in table for step in row]
    present = {action.op for step in steps for action in step.actions}
    kinds = {kind for plan in plans for kind in Shades(plan).kinds()}
    entries = []
    for kind in operations():
        if kind.op in present:
            shaded = [(tint(kind.colour, strength), f"{kind.text}, {text}") for strength, text in sorted(kinds, reverse=True)]
            is_shaded = kind.track is Track.COMPUTE and len(kinds) > 1
            entries += shaded if is_shaded else [(kind.colour, kind.text)]
    if any(map(recompute_in_backward, plans)):
        entries.append((operation(Op.R).colour, "recompute inside a backward"))
    draw_entries(figure, entries, len(entries) if len(entries) < 6 else 4)


def draw_entries(figure: Figure, entries: Iterable[tuple[str, str]], num_columns: int) -> None:
    """Draw colours and their meanings below a picture."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for colour, name in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, fontsize=9, frameon=False)


class Shades:
    """Colour of every action of a plan: hue by operation, strength by the kind of chunk."""

    def __init__(self, plan: Plan) -> None:
        slices = [chunk.slice_of(plan.lengths) for chunk in plan.chunks]
        self._sliced = list(dict.fromkeys(s.sequence for s in slices if s is not None))
        turn = {sequence: i % len(_SLICED) for i, sequence in enumerate(self._sliced)}
        base = [_BATCHED if s is None else _SLICED[turn[s.sequence]] for s in slices]
        self._strength = [strength * _ODD if c % 2 else strength for c, strength in enumerate(base)]
        self._has_batched = any(s is None for s in slices)

    def strength(self, chunk: int) -> float:
        """Strength of the colours of a chunk's actions, for `tint`."""
        return self._strength[chunk]

    def colour(self, action: Action) -> str:
        return tint(operation(action.op).colour, self.strength(action.chunk))

    def kinds(self) -> list[tuple[float, str]]:
        """Strength and meaning of the kinds of chunks that the plan has."""
        kinds = [(_SLICED[0], "slice of a long sequence")] * bool(self._sliced)
        return kinds + [(_BATCHED, "whole sequences")] * self._has_batched


def tint(colour: str, strength: float) -> str:
    """Mix ``#RRGGBB`` with white: strength 1 is the colour itself, 0 is white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - value)):02X}" for value in channels)


def text_colour(background: str) -> str:
    """Return black or white, whichever has more contrast with ``#RRGGBB``."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
