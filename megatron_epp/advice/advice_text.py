"""Advice as text and as JSON, with the reasons for which configurations are slower than the best, in words with numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from megatron_epp.advice.configuration_search import CLOSE, TIE, Advice
from megatron_epp.advice.judge import Baseline, Judged, Parts
from megatron_epp.advice.question import Question
from megatron_epp.cost.casts import recipe_of
from megatron_epp.plan import is_unlimited
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.report.text import format_us, table

_NOTICED = 0.005
"""Share of the best step's time that a part must take longer to be named as the reason."""
_WIDTH = 128
_LINES = 6
"""Number of reasons of a kind that are printed unless all are requested."""
_NEAR = 0.1
"""Share by which plain 1F1B may be slower than the best configuration and still be called close."""
_REDUCTION = " In the best, {} go to reducing gradients and gathering weights, of which training may hide a part."
_NOT_SUBTRACTED = (
    "Both are {products}, and without what --epp refuses: FP4, --tp-comm-overlap. What these are "
    "worth to a training that has them is not subtracted."
)


def as_text(advice: Advice, show: int, everything: bool) -> str:
    """Format the advice: the input, the best configurations, a comparison with plain 1F1B, and the reasons against others."""
    best, question = advice.best[0], advice.question
    products = f"in FP8 ({name})" if (name := recipe_of(question.flags)) else "in the type of the weights, not in FP8"
    tried = len(advice.best) + len(advice.slower)
    fits = f"{tried} configurations fit, {len(advice.best)} of them were planned as training would plan them; "
    parts = [
        _asked(advice),
        fits + f"{sum(misfit.config is not None for misfit in advice.refused)} do not fit.",
        "\n".join(_table(advice, show)),
        _wrapped(
            "Layers are those of the stages in order: 2x3+4 are two stages of 3 and one of 4. Percentages are of a step. "
            "Waiting: a replica that has finished its part of the batch waits until the slowest one has."
            + (_REDUCTION.format(format_us(best.parts.reduction_us)) if best.parts.reduction_us else "")
        ),
        _wrapped(_plain_text(advice)),
        "\n".join(advice.gain.lines()),
        _wrapped(_NOT_SUBTRACTED.format(products=products)),
    ]
    limit = None if everything else _LINES
    others = [entry for entry in (*advice.best, *advice.slower) if entry is not best]
    slower = [entry for entry in others if entry.parts.step_us > (1 + CLOSE) * best.parts.step_us]
    if len(slower) < len(others):
        parts.append(_close_text(advice, [entry for entry in others if entry not in slower]))
    if slower:
        lines = [(entry.config.name, why_slower(question, entry, best)) for entry in slower]
        parts.append("\n".join(_listed("Slower:", lines, limit)))
    unfit = [misfit for misfit in advice.refused if misfit.config is not None]
    ruled_out = [misfit for misfit in advice.refused if misfit.config is None]
    for title, refused in (("Do not fit, the nearest first:", unfit), ("Ruled out:", ruled_out)):
        if refused:
            parts.append("\n".join(_listed(title, [(misfit.name, misfit.why) for misfit in refused], limit)))
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, break_on_hyphens=False))


def _asked(advice: Advice) -> str:
    """Describe the machine and the batch."""
    question = advice.question
    node, lengths = question.cluster.devices_per_node, question.lengths
    nodes = f", nodes of {node}" if question.devices > node else ""
    cap = "no memory cap" if is_unlimited(question.cap_bytes) else f"at most {format_gib(question.cap_bytes)} each"
    return _wrapped(
        f"{question.devices} devices of {question.cluster.name}{nodes}, {cap}. A batch of {len(lengths):,} sequences, "
        f"{question.tokens:,} tokens, of up to {max(lengths):,} tokens; one of {question.context:,} fits too."
    )


def _table(advice: Advice, show: int) -> list[str]:
    several = any(entry.config.virtual > 1 for entry in advice.best[:show])
    experts = any(entry.config.expert > 1 for entry in advice.best[:show])
    latents = any(entry.config.latents for entry in advice.best[:show])
    header = ["TP", "CP", "PP", "DP", *["EP"] * experts, *["VPP"] * several, *["latents"] * latents]
    header += ["layers", "tokens/s", "per device", "step"]
    header += ["bubble", "recompute", "exchange", "waiting", "reduce", "peak memory"]
    rows = []
    for entry in advice.best[:show]:
        config, parts = entry.config, entry.parts
        sizes = [config.tensor, config.context, config.pipeline, config.data, *[config.expert] * experts]
        stages = f"{config.virtual} {config.placement}" if config.virtual > 1 else "1"
        rate = advice.tokens_per_s(parts.step_us)
        shares = (parts.bubble_us, parts.recompute_us, parts.exchange_us, parts.waiting_us, parts.reduction_us)
        rows.append(
            [
                *map(str, sizes),
                *[stages] * several,
                *[config.latents] * latents,
                config.layers_text,
                f"{rate:,.0f}",
                f"{rate / config.devices:,.0f}",
                format_us(parts.step_us),
                *(f"{share / parts.step_us:.1%}" for share in shares),
                format_bytes(entry.peak_bytes),
            ]
        )
    return table(header, rows, left=())


def _plain_text(advice: Advice) -> str:
    if advice.plain is None:
        return "Megatron's own 1F1B fits at none of the sizes that were tried, with any layers, virtual stages or recompute."
    plain, best_us = advice.plain, advice.best[0].parts.step_us
    name = "interleaved 1F1B" if plain.config.virtual > 1 else "plain 1F1B"
    where = (
        f"{name} at its best has {plain.config.name}, rows of up to {plain.stock.row_tokens:,} tokens and "
        f"{plain.stock.recompute}: {advice.tokens_per_s(plain.step_us):,.0f} tokens/s, {best_us / plain.step_us:.0%} of the "
        "best above."
    )
    if plain.config.pipeline == 1:
        where += " Without a pipeline that is plain gradient accumulation."
    if len(plain.config.lockstep_groups[0]) > 1:
        where += " Its replicas are taken not to wait for each other where they share experts, as those of plans do."
    if best_us > (1 + TIE) * plain.step_us:
        return f"Megatron's own schedule is faster: {where}"
    if advice.plain_is_as_good:
        return f"Megatron's own schedule is as good (within {TIE:.0%}): {where}"
    head = "Megatron's own schedule comes close" if plain.step_us < (1 + _NEAR) * best_us else "Elastic plans pay"
    return f"{head}: {where}"


def _close_text(advice: Advice, close: list[Judged]) -> str:
    """Describe the configurations that are as good as the first one or even faster, with the differences of their steps."""
    count, best_us = len(close), advice.best[0].parts.step_us
    text = f"{count} {'other is' if count == 1 else 'others are'} as good within {CLOSE:.0%}."
    if any(entry.parts.step_us < best_us for entry in close):
        text += " The first has the fewest kinds of parallelism."
    steps = [f"{entry.config.name} {entry.parts.step_us / best_us - 1:+.1%}" for entry in close[:_LINES]]
    whose = "Its step" if count == 1 else "Their steps"
    return _wrapped(f"{text} {whose}, relative to the first's: {', '.join(steps)}{', ...' * (count > _LINES)}.")


def _listed(title: str, lines: list[tuple[str, str]], limit: int | None) -> Iterator[str]:
    yield title
    for name, why in lines[:limit]:
        yield f"  {name}: {why}"
    if limit is not None and len(lines) > limit:
        yield f"  and {len(lines) - limit} more (--all lists them)"


def why_slower(question: Question, entry: Judged, best: Judged) -> str:
    """Describe the part of a step that contributes most to a configuration's extra time over the best one."""
    slower = entry.parts.step_us / best.parts.step_us
    if slower <= 1 + CLOSE:
        return f"as good within {CLOSE:.0%}"
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
    crosses = question.shape(config).neighbours > question.cluster.devices_per_node
    fair_tokens, chunk_tokens = question.tokens // config.data, sum(plan.lengths) // len(plan.chunks)
    each = f", {chunk_tokens // config.ranks:,} on each of the {config.ranks} devices that share it (TP x CP)"
    room_bytes = min(cap - static for cap, static in zip(plan.cap_bytes, plan.static_bytes, strict=True))
    return {
        "compute_us": (
            "computing takes",
            f": its {len(plan.chunks)} chunks have {chunk_tokens:,} tokens on average{each if config.ranks > 1 else ''}, and "
            "kernels are slower per token the fewer they are",
        ),
        "exchange_us": (f"exchange within {sharing}{' across nodes' if crosses else ''} takes", ""),
        "recompute_us": ("recompute takes", f", as weights and optimizer leave {format_bytes(room_bytes)} for activations"),
        "bubble_us": (
            f"the bubble of a pipeline of {config.pipeline} is",
            f", with {sum(plan.lengths):,} tokens for each replica",
        ),
        "waiting_us": (
            f"{config.data} replicas wait for the slowest for",
            f": the longest document has {max(question.lengths):,} tokens, where a fair share has {fair_tokens:,}",
        ),
        "reduction_us": (f"reducing gradients over {config.context * config.data} ranks takes", ""),
    }[name]


def as_json(advice: Advice) -> dict[str, Any]:
    """Return every figure, with units in the names."""
    best, question, plain = advice.best[0], advice.question, advice.plain
    return {
        "devices": question.devices,
        "cluster": question.cluster.name,
        "cap_bytes": question.cap_bytes,
        "offload": question.options.offload,
        "context": question.context,
        "sequences": len(question.lengths),
        "tokens": question.tokens,
        "best": [_row(advice, entry, best) for entry in advice.best],
        "slower": [_row(advice, entry, best) for entry in advice.slower],
        "refused": [{"name": misfit.name, "why": misfit.why, "needed_bytes": misfit.needed_bytes} for misfit in advice.refused],
        "plain_1f1b": None if plain is None else _plain_row(advice, plain),
        "gain": advice.gain.as_json(),
    }


def _plain_row(advice: Advice, plain: Baseline) -> dict[str, Any]:
    return {
        "layout": asdict(plain.config),
        "row_tokens": plain.stock.row_tokens,
        "recompute": plain.stock.recompute,
        "step_us": plain.step_us,
        "tokens_per_s": advice.tokens_per_s(plain.step_us),
        "is_as_good": advice.plain_is_as_good,
    }


def _row(advice: Advice, entry: Judged, best: Judged) -> dict[str, Any]:
    return {
        "layout": asdict(entry.config),
        "is_exact": entry.is_exact,
        "tokens_per_s": advice.tokens_per_s(entry.parts.step_us),
        "step_us": entry.parts.step_us,
        "parts": asdict(entry.parts),
        "peak_bytes": entry.peak_bytes,
        "why": "" if entry is best else why_slower(advice.question, entry, best),
    }
