"""Figures of the demonstration as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_epp.contrib.demos.quickstart.demo_setting import CAP_SHARE
from megatron_epp.contrib.demos.quickstart.parts import ELASTIC, WHOLE, LongDocument, Parity, SkewedDocuments
from megatron_epp.contrib.demos.rounds import Rounds, doubt
from megatron_epp.plan.units import format_bytes
from megatron_epp.report.text import table

_Pairs = Sequence[tuple[float, float]]


def difference(losses: _Pairs) -> float:
    """Largest relative difference of two trainings' losses."""
    return max(abs(a - b) / abs(a) for a, b in losses)


def both_losses(skewed: SkewedDocuments) -> _Pairs:
    """Losses of every iteration, of whole documents and of elastic plans."""
    return tuple(zip(skewed.whole.losses, skewed.elastic.losses, strict=True))


def ratios(skewed: SkewedDocuments) -> dict[str, float | None]:
    """Return how many times as fast elastic plans are: planned, measured (medians), and by processor time (None on a GPU)."""
    whole, elastic = skewed.whole, skewed.elastic
    own = None if whole.own_us is None or elastic.own_us is None else whole.own_us / elastic.own_us
    measured = elastic.tokens_per_second.median / whole.tokens_per_second.median
    return {"planned": whole.planned_us / elastic.planned_us, "measured": measured, "by_processor_time": own}


def parity_lines(parity: Parity) -> list[str]:
    """Format the comparison with stock Megatron."""
    return [
        *_losses("stock Megatron", parity.losses),
        f"gradients of the first iteration: every parameter's differs by at most {parity.gradients:.1e} of its norm",
    ]


def skewed_lines(skewed: SkewedDocuments) -> list[str]:
    """Format the comparison on skewed documents: losses, then a row per schedule, then the ratio."""
    rows = [[name, *_row(schedule.tokens_per_second), format_bytes(schedule.peak_bytes)] for name, schedule in _both(skewed)]
    header = ("schedule", "tokens/s", "least", "most", "spread", "peak activations")
    lines = [*_losses("whole", both_losses(skewed)), "", *table(header, rows), "", _ratio_line(skewed)]
    if skewed.elastic.own_us is not None:
        lines.append("(processor time: makespans of both orders if no other program had taken time of a core)")
    return lines


def long_lines(long: LongDocument) -> list[str]:
    """Format the comparison on a batch with a long document."""
    rows = [
        ["whole documents, no recompute", "planned", format_bytes(long.plain_bytes)],
        ["whole documents, every layer recomputed", "measured", format_bytes(long.whole_bytes)],
        ["elastic plans", "measured", format_bytes(long.elastic_bytes)],
        ["cap", "", format_bytes(long.cap_bytes)],
    ]
    refused = "the planner would run whole documents under this cap"
    if long.needed_bytes is not None:
        refused = f"the planner refuses whole documents under this cap: they need {format_bytes(long.needed_bytes)} at least"
    return [*table(("", "", "activations"), rows, left=(0, 1)), refused, "", *_losses("whole", long.losses)]


def summary(parity: Parity, skewed: SkewedDocuments, long: LongDocument) -> list[str]:
    """Say in words what was shown."""
    whole, elastic = format_bytes(skewed.whole.peak_bytes), format_bytes(skewed.elastic.peak_bytes)
    return [
        f"- The same training as stock Megatron: losses are {_equal(difference(parity.losses))}, gradients "
        f"{_equal(parity.gradients)}.",
        f"- Documents of very different lengths, with {elastic} of activations instead of {whole}: {_ratio_line(skewed)}.",
        f"- A document of {max(long.lengths):,} tokens among {len(long.lengths) - 1} short ones: whole documents take "
        f"{format_bytes(long.whole_bytes)} with every layer recomputed. Elastic plans trained them in "
        f"{format_bytes(long.elastic_bytes)}; losses are {_equal(difference(long.losses))}.",
        "- It would be a tie where documents have similar lengths and fit: then whole documents fill the pipeline as well.",
    ]


def figures(parity: Parity, skewed: SkewedDocuments, long: LongDocument) -> dict[str, Any]:
    """Return all figures, as written to report.json."""
    of_long = {name: getattr(long, name) for name in long.__slots__ if name != "plan"}
    rates = {name: {"tokens_per_second": schedule.tokens_per_second.values} for name, schedule in _both(skewed)}
    return {
        "parity": asdict(parity) | {"max_relative_loss_difference": difference(parity.losses)},
        "skewed": {
            "schedules": {name: asdict(schedule) | rates[name] for name, schedule in _both(skewed)},
            "elastic_over_whole": ratios(skewed),
            "occupancy": asdict(skewed.occupancy),
            "activation_cap_bytes": skewed.cap_bytes,
            "max_relative_loss_difference": difference(both_losses(skewed)),
        },
        "long_document": of_long | {"max_relative_loss_difference": difference(long.losses)},
        "cap_share": CAP_SHARE,
    }


def _equal(relative: float) -> str:
    return f"equal within {relative:.0e}" if relative else "equal"


def _both(skewed: SkewedDocuments) -> tuple[tuple[str, Any], ...]:
    return ((WHOLE, skewed.whole), (ELASTIC, skewed.elastic))


def _row(rates: Rounds) -> list[str]:
    least, most = rates.range
    return [f"{rates.median:,.0f}", f"{least:,.0f}", f"{most:,.0f}", f"{rates.spread:.0%}"]


def _ratio_line(skewed: SkewedDocuments) -> str:
    ratio = ratios(skewed)
    parts = [f"elastic plans train {ratio['measured']:.2f} times as fast, {ratio['planned']:.2f} planned"]
    if ratio["by_processor_time"] is not None:
        parts.append(f"{ratio['by_processor_time']:.2f} by processor time alone")
    reason = doubt(skewed.whole.tokens_per_second, skewed.elastic.tokens_per_second, skewed.occupancy)
    return (f"{reason}: " if reason else "") + ", ".join(parts)


def _losses(name: str, losses: _Pairs) -> list[str]:
    rows = [(str(i), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b) / abs(a):.1e}") for i, (a, b) in enumerate(losses, 1)]
    return table(("iteration", f"loss, {name}", "loss, elastic", "relative difference"), rows, left=())
