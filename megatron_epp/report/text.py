"""Plans as text: one in a few lines, several for the same batch in a table, and one compared with its run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_epp.plan.chunk import Segment
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import printable
from megatron_epp.plan.recompute import Recompute
from megatron_epp.plan.serialize import digest
from megatron_epp.plan.simulate import simulate
from megatron_epp.plan.text import to_grid
from megatron_epp.plan.units import byte_unit, format_bytes
from megatron_epp.report import facts
from megatron_epp.report.measured import COMPUTE, Measured, measured_boxes, planned_boxes
from megatron_epp.report.table import clip, format_cap, format_us, table

_KINDS = ("split", "hybrid", "batched")
UNEVEN = 1.1
"""Smallest ratio of the busiest rank's load to the average for which `uneven_load` prints a line."""


def headline(plan: Plan) -> list[str]:
    """Lines with the planner, the pipeline and the batch, the chunks, the predicted figures, and the planner's notes."""
    kinds = Counter(chunk.kind(plan.lengths) for chunk in plan.chunks)
    cut = ", ".join(f"{kinds[kind]} {kind}" for kind in _KINDS if kinds[kind])
    predicted = plan.predicted
    peak, cap = max(zip(predicted.peak_bytes, plan.cap_bytes, strict=True), key=lambda pair: pair[0] / max(pair[1], 1))
    above = predicted.makespan_us / predicted.lower_bound_us - 1 if predicted.lower_bound_us else 0.0
    mode = ", forward only" if plan.forward_only else ""
    return [
        f"plan {digest(plan)[:12]}: planner {printable(plan.planner)}, costs {printable(plan.costs)}, "
        f"{plan.num_stages} stages on {plan.num_ranks} ranks, {_num_layers(plan)} layers{mode}",
        f"{facts.batch_text(plan)}, {plan.num_tokens:,} in all, in {len(plan.chunks)} chunks ({cut})",
        f"makespan {format_us(predicted.makespan_us)} ({above:.1%} above the lower bound), "
        f"bubble {predicted.bubble_fraction:.1%}, recompute {facts.recompute_share(plan):.1%}, "
        f"peak {format_bytes(peak, cap)} of {format_cap(cap, peak)}",
        *_memory_savings(plan),
        *(f"note: {printable(note)}" for note in plan.notes),
    ]


def _num_layers(plan: Plan) -> str:
    """Format the number of layers of all stages; two halves are one."""
    return str(sum(plan.num_layers) + sum(plan.half_layers) // 2) + ".5" * (sum(plan.half_layers) % 2)


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
        parts.append(
            f"offload copies {format_bytes(copied)} to host memory and back in {format_us(facts.copies_us(plan))}, "
            "overlapped with compute"
        )
        if plan.host_links:
            parts.append(f"{plan.num_ranks} ranks share {len(set(plan.host_links))} links to host memory")
    if plan.kv_offload:
        sequences = len({entry.sequence for entry in plan.kv_offload})
        count = len({entry.stage for entry in plan.kv_offload})
        stages = "all stages" if count == plan.num_stages else f"{count} of {plan.num_stages} stages"
        parts.append(
            f"KV offload of {sequences} sequence{'s' * (sequences > 1)} on {stages}: "
            f"{format_bytes(facts.kv_offload_bytes(plan))}, gradients included"
        )
    return ["; ".join(parts)] if parts else []


def chunk_table(plan: Plan, max_rows: int | None = 16, width: int | None = 120) -> list[str]:
    """Table with one line per chunk: kind, tokens, segments. A slice prints as ``sequence[start:end]``, a whole sequence as its
    number.
    """
    shown = plan.chunks if max_rows is None else plan.chunks[:max_rows]
    rows = [[str(c), k.kind(plan.lengths), f"{k.num_tokens:,}", _by_part(plan, c)] for c, k in enumerate(shown)]
    lines = [clip(line, width) for line in table(("chunk", "kind", "tokens", "segments"), rows, left=(1, 3))]
    if len(shown) < len(plan.chunks):
        lines.append(f"  ... and {len(plan.chunks) - len(shown)} more chunks")
    return lines


def rank_table(plan: Plan) -> list[str]:
    """Table with one line per rank: stages, busy time, bubble, peak memory and its cap, layers that recompute."""
    peak_size, peak_unit = byte_unit(max(plan.predicted.peak_bytes))
    rows = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        twice = sum(recompute.num_layers for stage in stages for recompute in plan.recompute[stage])
        total = sum(plan.num_layers[stage] for stage in stages) * len(plan.chunks)
        busy, bubble = format_us(facts.busy_us(plan, rank)), f"{facts.bubble_fraction(plan, rank):.1%}"
        peak = f"{plan.predicted.peak_bytes[rank] / peak_size:.2f}"
        rows.append(
            [str(rank), " ".join(map(str, stages)), busy, bubble, peak, format_cap(plan.cap_bytes[rank]), f"{twice}/{total}"]
        )
    return table(("rank", "stages", "busy", "bubble", f"peak {peak_unit}", "cap", "recompute layers"), rows, left=())


def uneven_load(plan: Plan) -> list[str]:
    """One or two lines if one rank computes much longer than the others although every stage has equally many layers."""
    busy = [facts.busy_us(plan, rank) for rank in range(plan.num_ranks)]
    most, least = max(busy), min(busy)
    times = most * len(busy) / sum(busy) if most else 1.0
    if times < UNEVEN or len(set(plan.num_layers)) > 1 or plan.half_layers:
        return []
    line = f"rank {busy.index(most)} computes {times:.2f} times as long as ranks do on average, so they wait in any order"
    layers = plan.num_layers[0] * len(plan.num_layers) // len(busy)
    if least * (layers + 1) >= most * layers:
        return [f"{line}; with a layer more another would be the slowest."]
    return [f"{line}.", "Give it fewer layers: --layout balanced, in training --decoder-last-pipeline-num-layers."]


def summary(plan: Plan, width: int | None = 120, max_chunks: int | None = 16) -> str:
    """Format the whole report: headline, chunks, ranks, and the order of each rank.

    Args:
        plan: a complete plan; its own predictions are printed, nothing is simulated.
        width: characters per line; longer lines are cut and end in ``…``. None: no limit.
        max_chunks: rows of the chunk table. None: all.
    """
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
        texts.append(str(sequence) if whole else f"{sequence}[{start}:{end}]")
    return " ".join(texts)


def comparison(
    plans: Sequence[tuple[str, Plan | None]], settings: Sequence[str] = (), values: Sequence[Sequence[str]] = ()
) -> str:
    """Table with one line per plan: makespan, ratio to the shortest, bubble, highest peak and its cap, recompute, chunks.

    Args:
        plans: name and plan, in the order to print; None if there is no plan, which the line states. Recompute is the share
            of all ranks' compute time.
        settings: titles of more columns, which show the settings of each plan.
        values: of these columns, a row for each plan.
    """
    if not plans:
        return "no plans to compare"
    header = ("plan", "makespan", "x best", "bubble", "peak", "cap", "recompute", "chunks", *settings)
    best_us = min((plan.predicted.makespan_us for _, plan in plans if plan is not None), default=0.0)
    rows = []
    for (name, plan), setting in zip(plans, values or [()] * len(plans), strict=True):
        if plan is None:
            rows.append([name, "no plan", *["-"] * (len(header) - 2)])
            continue
        predicted = plan.predicted
        peak, cap = max(zip(predicted.peak_bytes, plan.cap_bytes, strict=True))
        ratio = predicted.makespan_us / best_us if best_us else 1.0
        figures = [format_us(predicted.makespan_us), f"{ratio:.3f}", f"{predicted.bubble_fraction:.1%}"]
        memory = [format_bytes(peak, cap), format_cap(cap, peak), f"{facts.recompute_share(plan):.1%}"]
        rows.append([name, *figures, *memory, str(len(plan.chunks)), *setting])
    return "\n".join(table(header, rows))


def against(plan: Plan, measured: Measured) -> str:
    """Table that compares a plan with a run of it: makespan, bubble, and compute time of each operation over all ranks.

    Raises:
        PlanError: the measurement is of another plan, or the order deadlocks.
    """
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
