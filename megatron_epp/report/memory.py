"""The memory of a plan as text: per rank, the items of its peak and a small curve of its live bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from megatron_epp.plan.account import Account, Moment
from megatron_epp.plan.plan import is_unlimited
from megatron_epp.report.facts import host_peak_bytes, stages_of
from megatron_epp.report.table import byte_unit, format_bytes, format_cap, format_us, table

_COLUMNS = 8
"""Number of ranks in one table."""
_LEVELS = "▁▂▃▄▅▆▇█"
_LINE = "-"


def peak_table(account: Account) -> list[str]:
    """Table with a column per rank: static items, items added at the peak, and headroom below the cap."""
    ranks = list(range(len(account.static)))
    peaks = [account.peak(rank) for rank in ranks]
    size, unit = byte_unit(max(peak.num_bytes for peak in peaks))
    lines: list[str] = []
    for first in range(0, len(ranks), _COLUMNS):
        some = ranks[first : first + _COLUMNS]
        if lines:
            lines.append("")
        lines += _table(account, peaks, some, size, unit)
    return lines


def _table(account: Account, peaks: Sequence[Moment], ranks: Sequence[int], size: int, unit: str) -> list[str]:
    plan = account.timeline.plan

    def row(name: str, sizes: Sequence[int]) -> list[str]:
        return [name, *(f"{num_bytes / size:.2f}" if num_bytes else "" for num_bytes in sizes)]

    constant = [name for name in account.items if name in account.static[0]]
    varying = [name for name in account.items if name not in account.static[0]]
    rule = [_LINE * 6, *(_LINE * 6 for _ in ranks)]
    rows = [row(name, [peaks[rank].items.get(name, 0) for rank in ranks]) for name in constant]
    rows += [rule, row("static, in all", [plan.static_bytes[rank] for rank in ranks])]
    rows += [row(name, sizes) for name in varying if any(sizes := [peaks[rank].items.get(name, 0) for rank in ranks])]
    rows += [rule, row("peak", [peaks[rank].num_bytes for rank in ranks])]
    caps = _of(plan.cap_bytes, ranks)
    rows.append(["cap", *(format_cap(cap) if is_unlimited(cap) else f"{cap / size:.2f}" for cap in caps)])
    if not any(map(is_unlimited, caps)):
        rows.append(["headroom", *(f"{(plan.cap_bytes[r] - peaks[r].num_bytes) / size:.2f}" for r in ranks)])
    if any(hosts := host_peak_bytes(plan, account.timeline)):
        rows.append(row("host memory, at its peak", _of(hosts, ranks)))
    rows.append(["the peak is at", *(format_us(peaks[rank].time_us) for rank in ranks)])
    return table((unit, *(f"rank {rank}" for rank in ranks)), rows)


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
        kept = "; ".join(f"{chunks} (recompute: {text})" for text, chunks in groups.items()) or "no chunk"
        yield f"rank {rank} peaks while {peak.step.action} runs and keeps chunks {kept}"


def curves(account: Account, width: int) -> list[str]:
    """Lines with a curve of live bytes over time per rank, up to the cap or, if that is far higher, up to the highest peak.

    Args:
        width: characters of a curve.
    """
    timeline, plan = account.timeline, account.timeline.plan
    peak, cap = max(timeline.peak_bytes), max(plan.cap_bytes)
    top, what = (cap, "the cap") if cap < 3 * peak else (peak, "the highest peak")
    lines = [f"live bytes over {format_us(timeline.makespan_us)}; full height: {what}, {format_bytes(top)}"]
    for rank in range(plan.num_ranks):
        most = _most_per_column(timeline.live_bytes(rank), timeline.makespan_us, width)
        marks = "".join(_LEVELS[min(len(_LEVELS) - 1, int(num_bytes / top * len(_LEVELS)))] for num_bytes in most)
        lines.append(f"rank {rank:<2} {marks} {format_bytes(timeline.peak_bytes[rank])}")
    return lines


def figures(account: Account) -> list[dict[str, Any]]:
    """Return the figures of the memory report as data, one entry per rank."""
    plan, hosts = account.timeline.plan, host_peak_bytes(account.timeline.plan, account.timeline)
    found = []
    for rank in range(plan.num_ranks):
        peak, cap = account.peak(rank), plan.cap_bytes[rank]
        found.append(
            {
                "rank": rank,
                "stages": stages_of(plan, rank),
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
    return found


def main_items(items: dict[str, int], most: int = 3) -> str:
    """Format the largest items of a moment: ``12.00 GiB layers that keep everything, 3.31 GiB gradients, ...``."""
    largest = sorted(items.items(), key=lambda entry: -entry[1])[:most]
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in largest)


def _most_per_column(levels: list[tuple[float, int]], makespan_us: float, width: int) -> list[int]:
    most = [0] * width
    ends = [*levels[1:], (makespan_us, 0)]
    for (start_us, num_bytes), (end_us, _) in zip(levels, ends, strict=True):
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


def _of[T](column: Sequence[T], ranks: Sequence[int]) -> list[T]:
    return [column[rank] for rank in ranks]
