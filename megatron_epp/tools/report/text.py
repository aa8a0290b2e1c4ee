"""Plans as text: one in a few lines, several for the same batch in a table, one compared with its run, its memory; and what
their reports share: figures of a plan, numbers with units, aligned tables.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from megatron_epp.plan.boxes import COMPUTE, measured_boxes, planned_boxes
from megatron_epp.plan.chunk import NOTHING_BORROWED, Segment
from megatron_epp.plan.document import digest
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.kv_offload import host_peak_bytes
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.memory_breakdown import MemoryBreakdown
from megatron_epp.plan.plan import Plan, is_unlimited
from megatron_epp.plan.plan_figures import bubble_fraction, busy_us, copies_us, is_calibrated, kv_offload_bytes, recompute_share
from megatron_epp.plan.reading import printable
from megatron_epp.plan.recompute import Recompute
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.units import byte_unit, format_bytes

_KINDS = ("split", "hybrid", "batched")
_UNEVEN = 1.1  # smallest ratio of the busiest rank's load to the average for which `uneven_load` prints a line
_COLUMNS = 8  # number of ranks in one table
_BARS = "▁▂▃▄▅▆▇█"


def format_cap(cap_bytes: int, *others: float) -> str:
    return "unlimited" if is_unlimited(cap_bytes) else format_bytes(cap_bytes, *others)


def format_us(time_us: float) -> str:
    """Format microseconds as ``812.5 us``, ``12.35 ms`` or ``3.210 s``."""
    if time_us < 1e3:
        return f"{time_us:.1f} us"
    return f"{time_us / 1e3:.2f} ms" if time_us < 1e6 else f"{time_us / 1e6:.3f} s"


def clip(line: str, width: int | None) -> str:
    """Cut a line to `width` characters, the last of them ``…`` if text was cut."""
    return line if width is None or len(line) <= width else line[: max(width - 1, 0)] + "…"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table, columns two spaces apart; those in `left` align left, the others hold numbers and align right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    form = "  ".join(f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in cells]


def batch_text(plan: Plan) -> str:
    """Describe the batch: ``6 sequences of 500 to 2,000 tokens``."""
    count, least, most = len(plan.lengths), min(plan.lengths), max(plan.lengths)
    return f"{count:,} sequence{'s' * (count != 1)} of {f'{least:,} to ' * (least < most)}{most:,} tokens"


def calibration(plan: Plan) -> str:
    """Addition to a plan's figures where its times are not calibrated; empty if they are."""
    return "" if is_calibrated(plan) else " (times by formula, not calibrated)"


def headline(plan: Plan) -> list[str]:
    kinds = Counter(chunk.kind(plan.lengths) for chunk in plan.chunks)
    cut = ", ".join(f"{kinds[kind]} {kind}" for kind in _KINDS if kinds[kind])
    predicted, tokens = plan.predicted, f"{sum(plan.lengths):,} in all"
    if shared := plan.num_shared_tokens:
        tokens += f", of which {plan.num_tokens:,} run ({shared:,} are in common with others)"
    peak, cap = max(zip(predicted.peak_bytes, plan.cap_bytes, strict=True), key=lambda pair: pair[0] / max(pair[1], 1))
    above = predicted.makespan_us / predicted.lower_bound_us - 1 if predicted.lower_bound_us else 0.0
    mode, layers = ", forward only" * plan.forward_only, sum(plan.num_layers)
    return [
        f"plan {digest(plan)[:12]}: planner {printable(plan.planner)}, costs {printable(plan.costs)}, "
        f"{plan.num_stages} stages on {plan.num_ranks} ranks, {layers} layers{mode}",
        f"{batch_text(plan)}, {tokens}, in {len(plan.chunks)} chunks ({cut})",
        f"makespan {format_us(predicted.makespan_us)} ({above:.1%} above the lower bound), "
        f"bubble {predicted.bubble_fraction:.1%}, recompute {recompute_share(plan):.1%}, "
        f"peak {format_bytes(peak, cap)} of {format_cap(cap, peak)}",
        *_memory_savings(plan),
        *(f"note: {printable(note)}" for note in plan.notes),
    ]


def _memory_savings(plan: Plan) -> list[str]:
    """Costs of recompute, offload and KV offload on one line; an empty list if there are none."""
    counts = Recompute(*map(sum, zip(*(recompute for row in plan.recompute for recompute in row), strict=True)))
    copied = sum(copy.free_bytes for copies in plan.copies for copy in copies)
    parts = []
    if counts.num_layers:
        passes = sum(plan.num_layers) * len(plan.chunks)
        took = format_us(sum(map(sum, plan.recompute_us)))
        parts.append(f"recompute takes {took} of all ranks' time: {counts} of {passes:,} layer passes")
    if copied:
        took = f"in {format_us(copies_us(plan))}, overlapped with compute"
        parts.append(f"offload copies {format_bytes(copied)} to host memory and back {took}")
        if plan.host_links:
            parts.append(f"{plan.num_ranks} ranks share {len(set(plan.host_links))} links to host memory")
    if plan.kv_offload:
        sequences = len({entry.sequence for entry in plan.kv_offload})
        count = len({entry.stage for entry in plan.kv_offload})
        stages = "all stages" if count == plan.num_stages else f"{count} of {plan.num_stages} stages"
        size = f"{format_bytes(kv_offload_bytes(plan))}, gradients included"
        parts.append(f"KV offload of {sequences} sequence{'s' * (sequences > 1)} on {stages}: {size}")
    return ["; ".join(parts)] if parts else []


def chunk_table(plan: Plan, max_rows: int | None = 16, width: int | None = 120) -> list[str]:
    """Table with a line per chunk; a slice prints as ``sequence[start:end]``, a whole sequence as its number.

    Where it begins like another one, that follows behind ``<``, which a line below the table explains.
    """
    shown = plan.chunks if max_rows is None else plan.chunks[:max_rows]
    rows = [[str(c), k.kind(plan.lengths), f"{k.num_tokens:,}", _by_part(plan, c)] for c, k in enumerate(shown)]
    lines = [clip(line, width) for line in table(("chunk", "kind", "tokens", "segments"), rows, left=(1, 3))]
    if len(shown) < len(plan.chunks):
        lines.append(f"  ... and {len(plan.chunks) - len(shown)} more chunks")
    sharing = (part for chunk in shown for part in chunk.segments if plan.borrowed and plan.borrowed[part.sequence].tokens)
    if (part := next(sharing, None)) is not None:
        other, shared = plan.borrowed[part.sequence]
        says = f"the first {shared:,} tokens of sequence {part.sequence} are those of sequence {other}, and run once"
        lines.append(f"  {_segments([part], plan)}: {says}")
    return lines


def rank_table(plan: Plan) -> list[str]:
    peak_size, peak_unit = byte_unit(max(plan.predicted.peak_bytes))
    rows = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        twice = sum(recompute.num_layers for stage in stages for recompute in plan.recompute[stage])
        total = sum(plan.num_layers[stage] for stage in stages) * len(plan.chunks)
        busy, bubble = format_us(busy_us(plan, rank)), f"{bubble_fraction(plan, rank):.1%}"
        memory = f"{plan.predicted.peak_bytes[rank] / peak_size:.2f}", format_cap(plan.cap_bytes[rank])
        rows.append([str(rank), " ".join(map(str, stages)), busy, bubble, *memory, f"{twice}/{total}"])
    return table(("rank", "stages", "busy", "bubble", f"peak {peak_unit}", "cap", "recompute layers"), rows, left=())


def uneven_load(plan: Plan) -> list[str]:
    """One or two lines if one rank computes much longer than the others although every stage has equally many layers."""
    busy = [busy_us(plan, rank) for rank in range(plan.num_ranks)]
    most, least = max(busy), min(busy)
    times = most * len(busy) / sum(busy) if most else 1.0
    if times < _UNEVEN or len(set(plan.num_layers)) > 1:
        return []
    line = f"rank {busy.index(most)} computes {times:.2f} times as long as ranks do on average, so they wait in any order"
    layers = plan.num_layers[0] * len(plan.num_layers) // len(busy)
    if least * (layers + 1) >= most * layers:
        return [f"{line}; with a layer more another would be the slowest."]
    return [f"{line}.", "Give it fewer layers: --layout balanced, in training --decoder-last-pipeline-num-layers."]


def summary(plan: Plan, width: int | None = 120, max_chunks: int | None = 16) -> str:
    """Format headline, chunks, ranks, and the order of each rank; lines are cut at `width` characters, None for no limit."""
    grid = [clip(line, width) for line in to_grid(plan).splitlines()]
    parts = [headline(plan), chunk_table(plan, max_chunks, width), rank_table(plan) + uneven_load(plan), grid]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _by_part(plan: Plan, chunk: int) -> str:
    """Segments of a chunk; where an extension of the plan divides them, part by part."""
    own = plan.chunks[chunk]
    parts = [part for extension in plan.extensions for part in extension.divided(chunk)]
    if not parts:
        return _segments(own.segments, plan)
    return "; ".join(f"{name}: {_segments([own.segments[position] for position in at], plan)}" for name, at in parts)


def _segments(segments: Sequence[Segment], plan: Plan) -> str:
    texts = []
    for sequence, start, end in segments:
        whole = start == 0 and end == plan.lengths[sequence]
        lender, shared = plan.borrowed[sequence] if plan.borrowed else NOTHING_BORROWED
        texts.append((str(sequence) if whole else f"{sequence}[{start}:{end}]") + f"<{lender}" * (shared > 0))
    return " ".join(texts)


def comparison(plans: Sequence[tuple[str, Plan | None, str]]) -> str:
    """Table with one line per plan, None where there is none; the last of each is the size of its chunks or rows."""
    header = ("plan", "makespan", "x best", "bubble", "peak", "cap", "recompute", "chunks", "size")
    best_us = min((plan.predicted.makespan_us for _, plan, _ in plans if plan is not None), default=0.0)
    rows = []
    for name, plan, size in plans:
        if plan is None:
            rows.append([name, "no plan", *["-"] * (len(header) - 2)])
            continue
        predicted = plan.predicted
        peak, cap = max(zip(predicted.peak_bytes, plan.cap_bytes, strict=True))
        ratio = predicted.makespan_us / best_us if best_us else 1.0
        figures = [format_us(predicted.makespan_us), f"{ratio:.3f}", f"{predicted.bubble_fraction:.1%}"]
        memory = [format_bytes(peak, cap), format_cap(cap, peak), f"{recompute_share(plan):.1%}"]
        rows.append([name, *figures, *memory, str(len(plan.chunks)), size])
    return "\n".join(table(header, rows))


def against(plan: Plan, measured: Measured) -> str:
    """Table of a plan and a run of it: makespan, bubble, compute by operation. Raises `PlanError` for a run of another plan."""
    timeline = simulate(plan)
    took_us: list[dict[str, float]] = [defaultdict(float), defaultdict(float)]
    for total_us, boxes in zip(took_us, (planned_boxes(timeline), measured_boxes(plan, measured)), strict=True):
        for box in boxes:
            if box.stream == COMPUTE:
                total_us[box.action.op] += box.end_us - box.start_us
    times = [("makespan", timeline.makespan_us, measured.makespan_us)]
    times += [(f"all {op}", planned_us, took_us[1][op]) for op, planned_us in took_us[0].items()]
    rows = [[name, format_us(a), format_us(b), f"{b / a:.3f}" if a else ""] for name, a, b in times]
    rows.insert(1, ["bubble", f"{timeline.bubble_fraction:.1%}", f"{measured.bubble_fraction:.1%}", ""])
    return "\n".join(table(("", "planned", "measured", "ratio"), rows))


def peak_table(breakdown: MemoryBreakdown) -> list[str]:
    """Table with a column per rank: static items, items added at the peak, and headroom below the cap."""
    plan = breakdown.timeline.plan
    peaks = [breakdown.peak(rank) for rank in range(plan.num_ranks)]
    size, unit = byte_unit(max(peak.num_bytes for peak in peaks))

    def row(name: str, sizes: Sequence[int]) -> list[str]:
        return [name, *(f"{num_bytes / size:.2f}" if num_bytes else "" for num_bytes in sizes)]

    of_item = {name: [peak.items.get(name, 0) for peak in peaks] for name in breakdown.items}
    static = [row(name, sizes) for name, sizes in of_item.items() if name in breakdown.static[0]]
    varying = [row(name, sizes) for name, sizes in of_item.items() if name not in breakdown.static[0] and any(sizes)]
    rule = ["-" * 6] * (1 + plan.num_ranks)
    rows = [*static, rule, row("static, in all", plan.static_bytes), *varying, rule]
    rows.append(row("peak", [peak.num_bytes for peak in peaks]))
    rows.append(["cap", *(format_cap(cap) if is_unlimited(cap) else f"{cap / size:.2f}" for cap in plan.cap_bytes)])
    if not any(map(is_unlimited, plan.cap_bytes)):
        room = (cap - peak.num_bytes for cap, peak in zip(plan.cap_bytes, peaks, strict=True))
        rows.append(["headroom", *(f"{num_bytes / size:.2f}" for num_bytes in room)])
    if any(hosts := host_peak_bytes(plan, breakdown.timeline)):
        rows.append(row("host memory, at its peak", hosts))
    rows.append(["the peak is at", *(format_us(peak.time_us) for peak in peaks)])
    rows.insert(0, [unit, *(f"rank {rank}" for rank in range(plan.num_ranks))])
    lines: list[str] = []
    for first in range(0, plan.num_ranks, _COLUMNS):
        header, *cells = ((name, *of_ranks[first : first + _COLUMNS]) for name, *of_ranks in rows)
        lines += [""] * bool(lines) + table(header, cells)
    return lines


def peak_lines(breakdown: MemoryBreakdown) -> Iterator[str]:
    """Yield a line per rank: the action at its peak, and the chunks that wait for their backward, by recompute modes."""
    plan = breakdown.timeline.plan
    for rank in range(plan.num_ranks):
        peak = breakdown.peak(rank)
        if peak.step is None:
            yield f"rank {rank} needs no more than its static memory"
            continue
        alive = [(str(plan.recompute[stage][c]), stage, c) for stage, c in breakdown.alive(rank, peak)]
        groups = {text: _numbers([c for _, _, c in some]) for text, some in groupby(sorted(alive), key=lambda entry: entry[0])}
        chunks_alive = "; ".join(f"{chunks} (recompute: {text})" for text, chunks in groups.items()) or "no chunk"
        yield f"rank {rank} peaks while {peak.step.action} runs and keeps chunks {chunks_alive}"


def curves(breakdown: MemoryBreakdown, width: int) -> list[str]:
    """Draw live bytes over time as lines of text, per rank, up to the cap or, if the cap is far higher, to the highest peak."""
    timeline, plan = breakdown.timeline, breakdown.timeline.plan
    peak, cap = max(timeline.peak_bytes), max(plan.cap_bytes)
    top, what = (cap, "the cap") if cap < 3 * peak else (peak, "the highest peak")
    lines = [f"live bytes over {format_us(timeline.makespan_us)}; full height: {what}, {format_bytes(top)}"]
    for rank in range(plan.num_ranks):
        most, live = [0] * width, timeline.live_bytes(rank)
        for (start_us, num_bytes), (end_us, _) in pairwise([*live, (timeline.makespan_us, 0)]):
            ends_us, whole_us = (start_us, end_us), timeline.makespan_us or 1.0
            first, last = (min(width - 1, int(time_us / whole_us * width)) for time_us in ends_us)
            most[first : last + 1] = [max(before, num_bytes) for before in most[first : last + 1]]
        marks = "".join(_BARS[min(len(_BARS) - 1, int(num_bytes / top * len(_BARS)))] for num_bytes in most)
        lines.append(f"rank {rank:<2} {marks} {format_bytes(timeline.peak_bytes[rank])}")
    return lines


def memory_figures(breakdown: MemoryBreakdown) -> list[dict[str, Any]]:
    plan, hosts = breakdown.timeline.plan, host_peak_bytes(breakdown.timeline.plan, breakdown.timeline)
    rows: list[dict[str, Any]] = []
    for rank, peak in enumerate(map(breakdown.peak, range(plan.num_ranks))):
        static, cap = {name: size for name, size in breakdown.static[rank].items() if size}, plan.cap_bytes[rank]
        row = {"rank": rank, "stages": plan.stages_of(rank), "static": static, "static_bytes": plan.static_bytes[rank]}
        row |= {"peak": peak.items, "peak_bytes": peak.num_bytes, "peak_us": peak.time_us}
        row |= {"peak_action": None if peak.step is None else str(peak.step.action)}
        row |= {"alive": [*map(list, breakdown.alive(rank, peak))], "live_bytes": breakdown.timeline.live_bytes(rank)}
        rows.append(row | {"cap_bytes": cap, "headroom_bytes": cap - peak.num_bytes, "host_peak_bytes": hosts[rank]})
    return rows


def _numbers(chunks: Sequence[int]) -> str:
    """Format numbers as ranges, such as ``0-3 5``."""
    chunks = sorted(set(chunks))
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(chunks)) if b > a + 1), len(chunks)]
    runs = [chunks[a:b] for a, b in pairwise(cuts)]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
