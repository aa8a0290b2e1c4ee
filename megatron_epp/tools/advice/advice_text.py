"""Advice as text and as JSON, with the reasons for which configurations are slower than the best, in words with numbers."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, fields
from typing import Any

from megatron_epp.cost.casts import recipe_of
from megatron_epp.plan import is_unlimited
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.tools.advice.configuration_search import CLOSE, TIE, Advice
from megatron_epp.tools.advice.judge import Judged, Parts
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.report.text import format_us, table

_NOTICED = 0.005  # share of the best step's time that a part must take longer to be named as the reason
_WIDTH = 128
_LINES = 6  # number of configurations of a kind that are listed unless all are requested
_USUAL = {"EP": "1", "VPP": "1", "latents": ""}  # columns that are left out where every configuration has this
_READ = (
    "Layers are those of the stages in order: 2x3+4 are two stages of 3 and one of 4. Percentages are of a step. Waiting: a "
    f"replica that has finished its part of the batch waits until the slowest one has. Of those within {CLOSE:.0%} of the "
    "fastest the first has the fewest kinds of parallelism."
)
_REDUCTION = " In the best, {} go to reducing gradients and gathering weights, of which training may hide a part."
_NOT_SUBTRACTED = (
    "Both are {products}, and without what --epp refuses: FP4, --tp-comm-overlap. What these are "
    "worth to a training that has them is not subtracted."
)


def as_text(advice: Advice, show: int, everything: bool) -> str:
    """Format the advice: the input, the best configurations, a comparison with plain 1F1B, and the reasons against others."""
    best, question = advice.best[0], advice.question
    products = f"in FP8 ({name})" if (name := recipe_of(question.flags)) else "in the type of the weights, not in FP8"
    others = [(entry.config.name, why_slower(question, entry, best)) for entry in (*advice.best[1:], *advice.slower)]
    unfit = [(misfit.name, misfit.why) for misfit in advice.refused if misfit.config is not None]
    ruled_out = [(misfit.name, misfit.why) for misfit in advice.refused if misfit.config is None]
    parts = [
        _wrapped(_asked(question)),
        f"{1 + len(others)} configurations fit, {len(advice.best)} of them were planned as training would plan them; "
        f"{len(unfit)} do not fit.",
        "\n".join(_table(advice, show)),
        _wrapped(_READ + _REDUCTION.format(format_us(best.parts.reduction_us)) * (best.parts.reduction_us > 0)),
        _wrapped(_plain_text(advice)),
        "\n".join(advice.gain.lines()),
        _wrapped(_NOT_SUBTRACTED.format(products=products)),
    ]
    for title, lines in (("Others:", others), ("Do not fit, the nearest first:", unfit), ("Ruled out:", ruled_out)):
        shown = lines if everything else lines[:_LINES]
        more = [f"  and {len(lines) - len(shown)} more (--all lists them)"] * (len(lines) > len(shown))
        parts += ["\n".join([title, *(f"  {name}: {why}" for name, why in shown), *more])] * bool(lines)
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, break_on_hyphens=False))


def _asked(question: Question) -> str:
    node, lengths = question.cluster.devices_per_node, question.lengths
    nodes = f", nodes of {node}" if question.devices > node else ""
    cap = "no memory cap" if is_unlimited(question.cap_bytes) else f"at most {format_gib(question.cap_bytes)} each"
    return (
        f"{question.devices} devices of {question.cluster.name}{nodes}, {cap}. A batch of {len(lengths):,} sequences, "
        f"{question.tokens:,} tokens, of up to {max(lengths):,} tokens; one of {question.context:,} fits too."
    )


def _table(advice: Advice, show: int) -> list[str]:
    rows = []
    for entry in advice.best[:show]:
        config, parts = entry.config, entry.parts
        rate = advice.tokens_per_s(parts.step_us)
        shares = {"bubble": parts.bubble_us, "recompute": parts.recompute_us, "exchange": parts.exchange_us}
        shares |= {"waiting": parts.waiting_us, "reduce": parts.reduction_us}
        rows.append(
            {"TP": str(config.tensor), "CP": str(config.context), "PP": str(config.pipeline), "DP": str(config.data)}
            | {"EP": str(config.expert), "VPP": f"{config.virtual} {config.placement}" if config.virtual > 1 else "1"}
            | {"latents": config.latents, "layers": config.layers_text}
            | {"tokens/s": f"{rate:,.0f}", "per device": f"{rate / config.devices:,.0f}", "step": format_us(parts.step_us)}
            | {name: f"{share_us / parts.step_us:.1%}" for name, share_us in shares.items()}
            | {"peak memory": format_bytes(entry.peak_bytes)}
        )
    header = [name for name in rows[0] if any(row[name] != _USUAL.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows], left=())


def _plain_text(advice: Advice) -> str:
    if advice.plain is None:
        return "Megatron's own 1F1B fits at none of the sizes that were tried, with any layers, virtual stages or recompute."
    plain, best_us = advice.plain, advice.best[0].parts.step_us
    head = "Elastic plans pay"
    if advice.plain_is_as_good:
        is_faster = best_us > (1 + TIE) * plain.stock.step_us
        head = f"Megatron's own schedule is {'faster' if is_faster else f'as good (within {TIE:.0%})'}"
    config, stock = plain.config, plain.stock
    shared = " Its replicas are taken not to wait for each other where they share experts, as those of plans do."
    return (
        f"{head}: {'interleaved' if config.virtual > 1 else 'plain'} 1F1B at its best has {config.name}, rows of up to "
        f"{stock.row_tokens:,} tokens and {stock.recompute}: {advice.tokens_per_s(plain.stock.step_us):,.0f} tokens/s, "
        f"{best_us / plain.stock.step_us:.0%} of the best above." + shared * (len(config.lockstep_groups[0]) > 1)
    )


def why_slower(question: Question, entry: Judged, best: Judged) -> str:
    """Describe the part of a step that contributes most to a configuration's extra time over the best one."""
    slower = entry.parts.step_us / best.parts.step_us
    if slower <= 1 + CLOSE:
        return f"as good within {CLOSE:.0%} ({slower - 1:+.1%})"
    excess_us = {part.name: getattr(entry.parts, part.name) - getattr(best.parts, part.name) for part in fields(Parts)}
    name = max(excess_us, key=lambda name: excess_us[name])
    head = f"{'' if entry.is_exact else 'about '}{slower:.2f}x the time"
    if excess_us[name] <= _NOTICED * best.parts.step_us:
        return head
    share, of_best = (f"{getattr(judged.parts, name) / judged.parts.step_us:.0%}" for judged in (entry, best))
    words, cause = _reason(question, entry, name)
    return f"{head}: {words} {share} of a step (best: {of_best}){cause}"


def _reason(question: Question, entry: Judged, name: str) -> tuple[str, str]:
    """Words for a part of a configuration's step, before its share of the step and after it."""
    config, plan = entry.config, entry.plan
    sizes = (("TP", config.tensor), ("CP", config.context), ("EP", config.expert), ("ETP", config.expert_tensor))
    sharing = " x ".join(f"{label} {size}" for label, size in sizes if size > 1)
    crosses = " across nodes" * (question.shape(config).neighbours > question.cluster.devices_per_node)
    tokens, count = sum(plan.lengths), len(plan.chunks)
    each = f", {tokens // count // config.ranks:,} on each of the {config.ranks} devices that share it (TP x CP)"
    chunks = f"its {count} chunks have {tokens // count:,} tokens on average{each * (config.ranks > 1)}"
    room_bytes = min(cap - static for cap, static in zip(plan.cap_bytes, plan.static_bytes, strict=True))
    longest = f": the longest document has {max(question.lengths):,} tokens, where a fair share has "
    return {
        "compute_us": ("computing takes", f": {chunks}, and kernels are slower per token the fewer they are"),
        "exchange_us": (f"exchange within {sharing}{crosses} takes", ""),
        "recompute_us": ("recompute takes", f", as weights and optimizer leave {format_bytes(room_bytes)} for activations"),
        "bubble_us": (f"the bubble of a pipeline of {config.pipeline} is", f", with {tokens:,} tokens for each replica"),
        "waiting_us": (f"{config.data} replicas wait for the slowest for", f"{longest}{question.tokens // config.data:,}"),
        "reduction_us": (f"reducing gradients over {config.context * config.data} ranks takes", ""),
    }[name]


def as_json(advice: Advice) -> dict[str, Any]:
    best, question, plain = advice.best[0], advice.question, advice.plain

    def timed(config: Configuration, step_us: float) -> dict[str, Any]:
        return {"layout": asdict(config), "step_us": step_us, "tokens_per_s": advice.tokens_per_s(step_us)}

    def row(entry: Judged) -> dict[str, Any]:
        why = "" if entry is best else why_slower(question, entry, best)
        figures = {"is_exact": entry.is_exact, "parts": asdict(entry.parts), "peak_bytes": entry.peak_bytes, "why": why}
        return timed(entry.config, entry.parts.step_us) | figures

    return {
        "devices": question.devices,
        "cluster": question.cluster.name,
        "cap_bytes": question.cap_bytes,
        "offload": question.options.offload,
        "context": question.context,
        "sequences": len(question.lengths),
        "tokens": question.tokens,
        "best": [*map(row, advice.best)],
        "slower": [*map(row, advice.slower)],
        "refused": [{"name": misfit.name, "why": misfit.why, "needed_bytes": misfit.needed_bytes} for misfit in advice.refused],
        "plain_1f1b": plain
        and timed(plain.config, plain.stock.step_us)
        | {"row_tokens": plain.stock.row_tokens, "recompute": plain.stock.recompute, "is_as_good": advice.plain_is_as_good},
        "gain": advice.gain.as_json(),
    }
