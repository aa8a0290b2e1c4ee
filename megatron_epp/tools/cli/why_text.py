"""Why a plan is as it is, as text: the walks of the search, and what other values of its settings would give."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby, pairwise

from megatron_epp.plan import is_unlimited
from megatron_epp.plan.plan_figures import recompute_share
from megatron_epp.plan.units import format_bytes
from megatron_epp.planner.candidates import Candidate
from megatron_epp.planner.settings import LONGEST, WHOLE, Recipe
from megatron_epp.planner.why import Explanation, Walk, changes
from megatron_epp.tools.report.text import format_cap, format_us, table


def why(explanation: Explanation, width: int | None = 120) -> list[str]:
    """Lines on how the search came to a plan, of at most so many characters; None for any number."""
    plan, (free, under) = explanation.plan, explanation.walks
    lines = ["Why this plan (settings and their values: megatron_epp/planner/README.md)", ""]
    lines += ["without memory caps", *_steps(explanation, free)]
    if not is_unlimited(cap := min(plan.cap_bytes)):
        lines += ["", f"under the cap of {format_cap(cap, max(plan.predicted.peak_bytes))}", *_steps(explanation, under)]
    if any(id(candidate.table) in explanation.remade for walk in explanation.walks for candidate in walk.candidates):
        lines.append("  * made again later, with more memory for messages: a step that was a gain can read as a loss")
    if not explanation.has_candidate:
        return [*lines, "  nothing fits in any order that was tried; the plan is in the order that keeps the least"]
    took_us, bound_us = plan.predicted.makespan_us, plan.predicted.lower_bound_us
    best = explanation.walks[-1].candidates[-1]
    if took_us < best.makespan_us:
        text = _changes(best.recipe, explanation.improved)
        lines.append(f"  local search{text and f' from {text}'}: {format_us(best.makespan_us)} -> {format_us(took_us)}")
    lines += ["", "what is left", *_left(explanation, took_us, bound_us)]
    if recompute_share(plan) and explanation.memory:
        lines += ["", "recompute: where a rank is above its cap, the cheapest per byte saved of the chunks that are alive"]
        lines += _recompute(explanation)
        if not any(other.setting == "copies" for other in explanation.others):
            lines += ["", "copies to the host were not tried (--offload)"]
    return [*lines, "", "other values of one setting, all else as chosen", *_others(explanation, width)]


def _left(explanation: Explanation, took_us: float, bound_us: float) -> Iterator[str]:
    plan, fastest = explanation.plan, explanation.walks[0].candidates[-1]
    yield f"  {took_us / bound_us - 1:.1%} above the bound of these {len(plan.chunks)} chunks, {format_us(bound_us)}"
    yield f"  {max(0.0, took_us / fastest.makespan_us - 1):.1%} above the fastest found without memory caps"
    waits, again = plan.predicted.bubble_fraction, recompute_share(plan)
    yield f"  ranks wait {waits:.1%} of the time; recompute is {again:.1%} of what they compute"


def _recompute(explanation: Explanation) -> Iterator[str]:
    plan = explanation.plan
    rows = []
    for rank, peaks in enumerate(explanation.memory):
        stages = plan.stages_of(rank)
        passes = sum(plan.num_layers[stage] * len(plan.chunks) for stage in stages)
        again = sum(recompute.num_layers for stage in stages for recompute in plan.recompute[stage])
        sizes = (format_bytes(peaks.plain), format_bytes(peaks.least), format_cap(plan.cap_bytes[rank], peaks.least))
        rows.append([str(rank), *sizes, f"{again} of {passes}"])
    names = ["rank", "peak with none", "with all", "cap", "layer passes that recompute"]
    yield from (f"  {line}" for line in table(names, rows))


def _steps(explanation: Explanation, walk: Walk) -> list[str]:
    first = walk.candidates[0]
    rows = [[_makespan(first, explanation), "", _described(first.recipe)]]
    for (before, after), word in zip(pairwise(walk.candidates), walk.words[1:], strict=True):
        text = _changes(before.recipe, after.recipe)
        gain = f"{after.makespan_us / before.makespan_us - 1:+.2%}" if before.fits and after.fits else ""
        rows.append([_makespan(after, explanation), gain, f"{word}{text}"])
    return [f"  {line}" for line in table(["makespan", "change", "recipe"], rows, left=(2,))]


def _changes(before: Recipe, after: Recipe) -> str:
    changed = changes(before, after).items()
    return ", ".join(f"{name} {_value(name, own)} -> {_value(name, other)}" for name, (own, other) in changed)


def _described(recipe: Recipe) -> str:
    return ", ".join(f"{name} {_value(name, value)}" for name, value in zip(Recipe._fields, recipe, strict=True))


def _value(name: str, value: object) -> str:
    if name == "grain" and value in (WHOLE, LONGEST):
        return "whole sequences" if value == WHOLE else "longest sequence"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _makespan(candidate: Candidate, explanation: Explanation) -> str:
    if candidate.fits:
        return format_us(candidate.makespan_us) + "*" * (id(candidate.table) in explanation.remade)
    return "does not fit" if is_unlimited(candidate.missing_bytes) else f"lacks {format_bytes(candidate.missing_bytes)}"


def _others(explanation: Explanation, width: int | None) -> Iterator[str]:
    best = explanation.walks[-1].candidates[-1]
    for name, group in groupby(explanation.others, key=lambda other: other.setting):
        parts: dict[str, list[str]] = {}
        for other in group:
            candidate = other.candidate
            if candidate is None:
                effect = "no such chunks"
            elif other.is_same:
                effect = "the same"
            elif not candidate.fits:
                effect = _makespan(candidate, explanation)
            else:
                effect = f"{candidate.makespan_us / best.makespan_us - 1:+.1%}"
            parts.setdefault(effect, []).append(_value(name, other.value))
        chosen = _value(name, getattr(best.recipe, name))
        effects = (f"{', '.join(values)}: {effect}".replace(" ", "\xa0") for effect, values in parts.items())
        line = f"  {name} {chosen}; " + "; ".join(effects)
        yield from (part.replace("\xa0", " ") for part in textwrap.wrap(line, width or len(line), subsequent_indent="    "))
