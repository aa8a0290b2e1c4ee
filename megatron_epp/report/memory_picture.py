"""The memory of a plan as a picture: per rank, the items of its live bytes over time, against the cap."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_epp.plan.account import Account
from megatron_epp.report.gantt import draw_caps, new_figure
from megatron_epp.report.table import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES, _DPI = 14.0, 120
_STATIC = ("#3B3B3B", "#5A5A5A", "#7A7A7A", "#989898", "#B5B5B5", "#CECECE", "#E2E2E2")
"""Greys of static items, in their order."""
_VARYING = (
    *("#0072B2", "#56B4E9", "#9BD3F5", "#CFE9FA", "#009E73", "#F0E442", "#E69F00"),
    *("#B8860B", "#D55E00", "#F7B58F", "#CC79A7", "#8E5BA6", "#D9C9E3"),
)
"""Colours of `Account.order`: Okabe and Ito's, with lighter ones for related items."""


def memory_picture(account: Account) -> Figure:
    """Draw the items of every rank as stacked areas over the time of the iteration, in ms.

    Raises:
        EppError: matplotlib is not installed.
    """
    plan, timeline = account.timeline.plan, account.timeline
    height = min(2.6, max(1.3, 9.0 / plan.num_ranks))
    figure, axes = new_figure((_WIDTH_INCHES, plan.num_ranks * height + 1.8), _DPI, plan.num_ranks, sharey=True)
    names, peak = account.items, max(timeline.peak_bytes)
    static = [name for name in names if name in account.static[0]]
    colours = dict(zip(static, _STATIC, strict=False)) | dict(zip(account.order, _VARYING, strict=True))
    size, unit = byte_unit(peak)
    for rank, axis in enumerate(axes):
        _draw(axis, account, rank, {name: colours[name] for name in names}, size)
        axis.set_ylabel(f"rank {rank}\n{unit}", fontsize=9)
    note = draw_caps(axes, plan.cap_bytes, peak, size)
    axes[0].set_xlim(0.0, timeline.makespan_us / 1e3 or 1.0)
    axes[-1].set_xlabel("ms")
    axes[0].set_title(f"planned memory of {len(plan.lengths):,} sequences in {len(plan.chunks)} chunks ({note})", loc="left")
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colours[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9, frameon=False)
    return figure


def save_memory_picture(account: Account, path: str | Path) -> None:
    """Write `memory_picture` to a file; the suffix selects the format. Raises the errors of `memory_picture`."""
    memory_picture(account).savefig(path)


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
