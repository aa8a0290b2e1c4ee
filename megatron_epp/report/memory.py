"""The memory of a plan, as text (items at the peak of each rank, curves of live bytes) and as a picture over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_epp.plan.account import Account
from megatron_epp.plan.plan import is_unlimited
from megatron_epp.plan.units import byte_unit, format_bytes
from megatron_epp.report.facts import host_peak_bytes
from megatron_epp.report.gantt import draw_caps, new_figure, save_picture
from megatron_epp.report.lanes import draw_entries, label_time
from megatron_epp.report.table import format_cap, format_us, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 8
"""Number of ranks in one table."""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH_INCHES, _DPI = 14.0, 120
_STATIC = ("#3B3B3B", "#5A5A5A", "#7A7A7A", "#989898", "#B5B5B5", "#CECECE", "#E2E2E2")
"""Greys of static items, in their order."""
_VARYING = (
    *("#0072B2", "#56B4E9", "#9BD3F5", "#CFE9FA", "#009E73", "#F0E442", "#E69F00"),
    *("#B8860B", "#D55E00", "#F7B58F", "#CC79A7", "#8E5BA6", "#D9C9E3"),
)
"""Colours of `Account.order`: Okabe and Ito's, with lighter ones for related items."""
_OTHER = "#000000"
"""Colour of items beyond these."""


def peak_table(account: Account) -> list[str]:
    """Table with a column per rank: static items, items added at the peak, and headroom below the cap."""
    plan = account.timeline.plan
    peaks = [account.peak(rank) for rank in range(plan.num_ranks)]
    size, unit = byte_unit(max(peak.num_bytes for peak in peaks))

    def row(name: str, sizes: Sequence[int]) -> list[str]:
        return [name, *(f"{num_bytes / size:.2f}" if num_bytes else "" for num_bytes in sizes)]

    static, varying = [], []
    for name in account.items:
        sizes = [peak.items.get(name, 0) for peak in peaks]
        if name in account.static[0]:
            static.append(row(name, sizes))
        elif any(sizes):
            varying.append(row(name, sizes))
    rule = ["-" * 6] * (1 + plan.num_ranks)
    rows = [*static, rule, row("static, in all", plan.static_bytes), *varying, rule]
    rows.append(row("peak", [peak.num_bytes for peak in peaks]))
    rows.append(["cap", *(format_cap(cap) if is_unlimited(cap) else f"{cap / size:.2f}" for cap in plan.cap_bytes)])
    if not any(map(is_unlimited, plan.cap_bytes)):
        room = (cap - peak.num_bytes for cap, peak in zip(plan.cap_bytes, peaks, strict=True))
        rows.append(["headroom", *(f"{num_bytes / size:.2f}" for num_bytes in room)])
    if any(hosts := host_peak_bytes(plan, account.timeline)):
        rows.append(row("host memory, at its peak", hosts))
    rows.append(["the peak is at", *(format_us(peak.time_us) for peak in peaks)])
    header = [unit, *(f"rank {rank}" for rank in range(plan.num_ranks))]
    lines: list[str] = []
    for first in range(1, len(header), _COLUMNS):
        part = slice(first, first + _COLUMNS)
        lines += [""] * bool(lines) + table((unit, *header[part]), [(cells[0], *cells[part]) for cells in rows])
    return lines


def peak_lines(account: Account) -> Iterator[str]:
    """Yield a line per rank: the action at its peak, and the chunks that wait for their backward, by recompute modes."""
    plan = account.timeline.plan
    for rank in range(plan.num_ranks):
        peak = account.peak(rank)
        if peak.step is None:
            yield f"rank {rank} needs no more than its static memory"
            continue
        alive = [(str(plan.recompute[stage][c]), stage, c) for stage, c in account.alive(rank, peak)]
        groups = {text: _numbers([c for _, _, c in some]) for text, some in groupby(sorted(alive), key=lambda entry: entry[0])}
        chunks_alive = "; ".join(f"{chunks} (recompute: {text})" for text, chunks in groups.items()) or "no chunk"
        yield f"rank {rank} peaks while {peak.step.action} runs and keeps chunks {chunks_alive}"


def curves(account: Account, width: int) -> list[str]:
    """Draw live bytes over time as lines of text, per rank, up to the cap or, if the cap is far higher, to the highest peak."""
    timeline, plan = account.timeline, account.timeline.plan
    peak, cap = max(timeline.peak_bytes), max(plan.cap_bytes)
    top, what = (cap, "the cap") if cap < 3 * peak else (peak, "the highest peak")
    lines = [f"live bytes over {format_us(timeline.makespan_us)}; full height: {what}, {format_bytes(top)}"]
    for rank in range(plan.num_ranks):
        most = _most_per_column(timeline.live_bytes(rank), timeline.makespan_us, width)
        marks = "".join(_BARS[min(len(_BARS) - 1, int(num_bytes / top * len(_BARS)))] for num_bytes in most)
        lines.append(f"rank {rank:<2} {marks} {format_bytes(timeline.peak_bytes[rank])}")
    return lines


def figures(account: Account) -> list[dict[str, Any]]:
    """Return the figures of the memory report as data, one entry per rank."""
    plan, hosts = account.timeline.plan, host_peak_bytes(account.timeline.plan, account.timeline)
    rows = []
    for rank in range(plan.num_ranks):
        peak, cap = account.peak(rank), plan.cap_bytes[rank]
        rows.append(
            {
                "rank": rank,
                "stages": plan.stages_of(rank),
                "static": {name: size for name, size in account.static[rank].items() if size},
                "static_bytes": plan.static_bytes[rank],
                "peak": peak.items,
                "peak_bytes": peak.num_bytes,
                "peak_us": peak.time_us,
                "peak_action": None if peak.step is None else str(peak.step.action),
                "alive": [list(pair) for pair in account.alive(rank, peak)],
                "cap_bytes": cap,
                "headroom_bytes": cap - peak.num_bytes,
                "host_peak_bytes": hosts[rank],
                "live_bytes": account.timeline.live_bytes(rank),
            }
        )
    return rows


def _most_per_column(live: list[tuple[float, int]], makespan_us: float, width: int) -> list[int]:
    most = [0] * width
    ends = [*live[1:], (makespan_us, 0)]
    for (start_us, num_bytes), (end_us, _) in zip(live, ends, strict=True):
        first, last = (min(width - 1, int(time_us / (makespan_us or 1.0) * width)) for time_us in (start_us, end_us))
        for column in range(first, last + 1):
            most[column] = max(most[column], num_bytes)
    return most


def _numbers(chunks: Sequence[int]) -> str:
    """Format numbers as ranges, such as ``0-3 5``."""
    chunks = sorted(set(chunks))
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(chunks)) if b > a + 1), len(chunks)]
    runs = [chunks[a:b] for a, b in pairwise(cuts)]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def item_colours(account: Account) -> dict[str, str]:
    """Colours ``#RRGGBB`` of all items that any rank ever has, from the bottom of a picture to its top."""
    names = account.items
    static = [name for name in names if name in account.static[0]]
    colours = dict(zip(static, _STATIC, strict=False)) | dict(zip(account.order, _VARYING, strict=False))
    return {name: colours.get(name, _OTHER) for name in names}


def memory_picture(account: Account) -> Figure:
    """Draw the items of every rank as stacked areas over the time of the iteration, in ms.

    Raises:
        EppError: matplotlib is not installed.
    """
    plan, timeline = account.timeline.plan, account.timeline
    height = min(2.6, max(1.3, 9.0 / plan.num_ranks))
    figure, axes = new_figure((_WIDTH_INCHES, plan.num_ranks * height + 1.8), _DPI, plan.num_ranks, sharey=True)
    colours, peak = item_colours(account), max(timeline.peak_bytes)
    size, unit = byte_unit(peak)
    for rank, axis in enumerate(axes):
        _draw(axis, account, rank, colours, size)
        axis.set_ylabel(f"rank {rank}\n{unit}", fontsize=9)
    note = draw_caps(axes, plan.cap_bytes, peak, size)
    axes[0].set_xlim(0.0, timeline.makespan_us / 1e3 or 1.0)
    label_time(axes[-1], timeline.makespan_us)
    axes[0].set_title(f"planned memory of {len(plan.lengths):,} sequences in {len(plan.chunks)} chunks ({note})", loc="left")
    draw_entries(figure, [(colour, name) for name, colour in colours.items()], min(4, len(colours)))
    return figure


def save_memory_picture(account: Account, path: str | Path) -> None:
    """Write `memory_picture` to a file; the suffix selects the format. Raises the errors of `memory_picture`."""
    save_picture(memory_picture(account), path)


def _draw(axis: Axes, account: Account, rank: int, colours: Mapping[str, str], size: int) -> None:
    """Draw the items of a rank as areas, the first at the bottom; `colours` is by item, and the unit is `size` bytes."""
    moments = {round(moment.time_us, 3): moment.items for moment in account.moments(rank)}
    times_ms = [*(time_us / 1e3 for time_us in moments), account.timeline.makespan_us / 1e3]
    items = [*moments.values()]
    items.append(items[-1])
    base = [0.0] * len(items)
    for name, colour in colours.items():
        top = [low + entry.get(name, 0) / size for low, entry in zip(base, items, strict=True)]
        axis.fill_between(times_ms, base, top, step="post", facecolor=colour, linewidth=0, label=f"_{name}")
        base = top
