"""The memory of a plan as a picture: per rank, the items of its live bytes over time, against the cap."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_epp.plan.account import Account
from megatron_epp.report.lanes import matplotlib_classes
from megatron_epp.report.table import byte_unit, format_cap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STATIC = ("#3B3B3B", "#5A5A5A", "#7A7A7A", "#989898", "#B5B5B5", "#CECECE", "#E2E2E2")
_PASSING = (
    "#0072B2",
    "#56B4E9",
    "#9BD3F5",
    "#CFE9FA",
    "#009E73",
    "#F0E442",
    "#E69F00",
    "#B8860B",
    "#D55E00",
    "#F7B58F",
    "#CC79A7",
    "#8E5BA6",
    "#D9C9E3",
)
_CAP_IN_SIGHT = 3


def memory_picture(account: Account) -> Figure:
    """Draw the items of every rank as stacked areas over the time of the iteration, in ms.

    Raises:
        EppError: matplotlib is not installed.
    """
    figure_class, canvas_class = matplotlib_classes()
    plan, timeline = account.timeline.plan, account.timeline
    height = min(2.6, max(1.3, 9.0 / plan.num_ranks))
    figure: Figure = figure_class(figsize=(14.0, plan.num_ranks * height + 1.8), dpi=120, layout="constrained")
    canvas_class(figure)
    axes = figure.subplots(plan.num_ranks, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    names, peak = account.items, max(timeline.peak_bytes)
    static = [name for name in names if name in account.static[0]]
    grey = dict(zip(static, _STATIC, strict=False))
    colours = grey | dict(zip(account.order, _PASSING, strict=True))
    size, unit = byte_unit(peak)
    for rank, axis in enumerate(axes):
        _draw(axis, account, rank, names, colours, size)
        cap = plan.cap_bytes[rank]
        if cap <= _CAP_IN_SIGHT * peak:
            axis.axhline(cap / size, color="black", linestyle=(0, (6, 3)), linewidth=1.1)
        axis.set_ylabel(f"rank {rank}\n{unit}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    shown = [cap for cap in plan.cap_bytes if cap <= _CAP_IN_SIGHT * peak]
    axes[0].set_xlim(0.0, timeline.makespan_us / 1e3 or 1.0)
    axes[0].set_ylim(0.0, max([peak, *shown]) / size * 1.06)
    axes[-1].set_xlabel("ms")
    note = "dashed: cap" if shown else f"cap {format_cap(max(plan.cap_bytes))}, not drawn"
    axes[0].set_title(f"planned memory of {len(plan.lengths):,} sequences in {len(plan.chunks)} chunks ({note})", loc="left")
    _legend(figure, names, colours)
    return figure


def save_memory_picture(account: Account, path: str | Path) -> None:
    """Write `memory_picture` to a file; the suffix selects the format. Raises the errors of `memory_picture`."""
    memory_picture(account).savefig(path)


def _draw(axis: Axes, account: Account, rank: int, names: list[str], colours: dict[str, str], size: int) -> None:
    moments = {round(moment.time_us, 3): moment.items for moment in account.moments(rank)}
    times_ms = [*(time_us / 1e3 for time_us in moments), account.timeline.makespan_us / 1e3]
    items: list[dict[str, Any]] = [*moments.values()]
    items.append(items[-1])
    base = [0.0] * len(items)
    for name in names:
        top = [low + entry.get(name, 0) / size for low, entry in zip(base, items, strict=True)]
        axis.fill_between(times_ms, base, top, step="post", facecolor=colours[name], linewidth=0, label=f"_{name}")
        base = top


def _legend(figure: Figure, names: list[str], colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colours[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9, frameon=False)
