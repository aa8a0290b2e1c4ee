"""The command that makes plans, and says why they are as they are."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

from megatron_epp.cost.balance import advice
from megatron_epp.cost.model import Costs
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add, names_of, options_from
from megatron_epp.plan.errors import EppError, InfeasibleError
from megatron_epp.plan.plan import Plan, is_unlimited
from megatron_epp.plan.plan_figures import recompute_share
from megatron_epp.plan.serialize import save
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.plan.writing import write_text
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.candidates import Candidate
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.settings import LONGEST, WHOLE, Recipe
from megatron_epp.planner.why import Explanation, Walk, changes, explain
from megatron_epp.tools.cli import planning_flags, terminal
from megatron_epp.tools.cli.layout_flag import AUTO, BALANCED, settle_latents
from megatron_epp.tools.cli.lengths import lengths_of
from megatron_epp.tools.cli.schedules import chosen_for
from megatron_epp.tools.cli.terminal import PROGRAM, Parser, is_page, progress, say, tell
from megatron_epp.tools.layouts.layout_choice import plan_once
from megatron_epp.tools.report import text as report_text
from megatron_epp.tools.report.gantt import memory_picture, save_picture
from megatron_epp.tools.report.page.html import Shown, save_page
from megatron_epp.tools.report.text import format_cap, format_us, table

_LARGEST_DEVICE_BYTES = 141 << 30  # memory of the largest device of shipped clusters, an H200's
_OTHER_SIZES = "\n`megatron-epp advise` tries sizes, layouts and contexts, and prints what fits."
_LABEL_WIDTH = 20  # width in characters reserved next to a curve of memory


def why(explanation: Explanation, width: int | None = 120) -> list[str]:
    """Lines on how the search came to a plan, of at most so many characters; None for any number."""
    plan, (free, under) = explanation.plan, explanation.walks
    lines = ["Why this plan (settings and their values: megatron_epp/planner/README.md)", ""]
    lines += ["without memory caps", *_steps(explanation, free)]
    if not is_unlimited(cap := min(plan.cap_bytes)):
        lines += ["", f"under the cap of {format_cap(cap, max(plan.predicted.peak_bytes))}", *_steps(explanation, under)]
    if any(id(candidate.table) in explanation.remade for walk in explanation.walks for candidate in walk.candidates):
        lines.append("  * made again later, with more memory for messages: a step that was a gain can read as a loss")
    if not explanation.walks[-1].candidates[-1].fits:
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
    plan, rows = explanation.plan, []
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
    described = ", ".join(f"{name} {_value(name, value)}" for name, value in first.recipe._asdict().items())
    rows = [[_makespan(first, explanation), "", described]]
    for (before, after), word in zip(pairwise(walk.candidates), walk.words[1:], strict=True):
        text = _changes(before.recipe, after.recipe)
        gain = f"{after.makespan_us / before.makespan_us - 1:+.2%}" if before.fits and after.fits else ""
        rows.append([_makespan(after, explanation), gain, f"{word}{text}"])
    return [f"  {line}" for line in table(["makespan", "change", "recipe"], rows, left=(2,))]


def _changes(before: Recipe, after: Recipe) -> str:
    changed = changes(before, after).items()
    return ", ".join(f"{name} {_value(name, own)} -> {_value(name, other)}" for name, (own, other) in changed)


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
            if (candidate := other.candidate) is None or other.is_same:
                effect = "no such chunks" if candidate is None else "the same"
            else:
                gain = f"{candidate.makespan_us / best.makespan_us - 1:+.1%}"
                effect = gain if candidate.fits else _makespan(candidate, explanation)
            parts.setdefault(effect, []).append(_value(name, other.value))
        chosen = _value(name, getattr(best.recipe, name))
        effects = (f"{', '.join(values)}: {effect}".replace(" ", "\xa0") for effect, values in parts.items())
        line = f"  {name} {chosen}; " + "; ".join(effects)
        yield from (part.replace("\xa0", " ") for part in textwrap.wrap(line, width or len(line), subsequent_indent="    "))


EXAMPLE = """\
example: three sequences on a 4-stage pipeline of an 8B model (the defaults)
  megatron-epp plan --lengths 1200,88,40961 -o plan.json
a batch of 512 drawn from a file of lengths
  shuf -n 512 lengths.txt | megatron-epp plan --lengths - --stages 8 --memory-cap-gb 40
the first 512 documents of a Megatron index, for a shipped model and cluster
  megatron-epp plan --lengths documents.idx --batch-size 512 --context 131072 \\
    --model llama3-8b --cluster h100x8 --stages 8 -o plan.json
before a launch, what every rank of 8 GPUs of 80 GB holds, and a picture of it over time
  megatron-epp plan --memory --lengths 131072,9000,800,350,120 --model llama3-8b --cluster h100x8 \\
    --stages 8 --memory-out memory.png
"""


def add_arguments(parser: Parser) -> None:
    planning_flags.add_problem(parser)
    add(parser, "planner")
    terminal.add_output(parser, "write the plan as JSON (default: do not)")
    switch = partial(parser.add_argument, action="store_true")
    switch("--why", help="print how the search came to the plan, why ranks recompute, and what other values would give")
    switch("--memory", help="print what every rank holds at its peak, part by part, and the smallest cap that would do")
    drawn = "draw memory over time, as .html to explore, .png, .svg or .pdf (default: do not)"
    parser.add_argument("--memory-out", type=terminal.picture_or_page, metavar="FILE", help=drawn)
    switch("--json", help="with --memory, print its figures as JSON")
    parser.add_argument("--layout-out", type=terminal.output, metavar="FILE", help="write the layout as JSON (default: do not)")
    add_width(parser)


def add_width(parser: Parser) -> None:
    parser.add_argument("--width", type=COUNT, default=120, metavar="N", help="characters per line of text (%(default)s)")
    parser.add_argument("--all", action="store_true", help="print every chunk and whole lines")


def text_of(plan_of_batch: Plan, args: argparse.Namespace) -> str:
    return report_text.summary(plan_of_batch, None, None) if args.all else report_text.summary(plan_of_batch, args.width)


def run(args: argparse.Namespace) -> int:
    if args.output and Path(args.output).suffix.lower() in (*terminal.PICTURES, terminal.PAGE):
        drawn = "--memory-out draws its memory, `megatron-epp show` its times"
        raise EppError(f"{args.output}: a plan is written as JSON; {drawn}")
    (batch,) = planning_flags.as_trained(args, lengths_of(args))
    planning_flags.tell_sharing(args)
    settle_latents(args, [batch])
    chosen = chosen_for(args, batch)
    layout, costs = chosen.layout, planning_flags.costs_of(args, batch.lengths, chosen.layout)
    problem = planning_flags.problem_of(args, batch, layout.placement)
    try:
        best, lines_why = _planned(problem, costs, args)
        refusal = ""
    except InfeasibleError as error:
        error = _remediable(error, args)
        if not args.memory or not error.least_cap_bytes:
            raise error from None
        refusal = error.text(names_of(args.parser))
        caps = tuple(max(cap, error.least_cap_bytes) for cap in problem.cap_bytes)
        best, lines_why = _planned(replace(problem, cap_bytes=caps), costs, args)
    if batch.borrowed and not best.borrowed:
        reason = "sharing them would not pay" if args.planner == "greedy" else f"planner {args.planner} shares none"
        tell(f"{PROGRAM}: tokens in common run for every sequence: {reason}")
    if args.output and refusal:  # the plan shown is of a larger cap
        tell(f"{args.output} is not written: nothing fits the cap")
    elif args.output:
        save(best, args.output)
    if args.layout_out:
        write_text(args.layout_out, layout.to_json())
    if args.memory or args.memory_out:
        _report_memory(args, problem, costs, best, refusal)
    else:
        say(f"{text_of(best, args)}\n\n{_proof(best)}")
    if args.json:
        return 0
    if (peak := max(best.predicted.peak_bytes)) > _LARGEST_DEVICE_BYTES and all(map(is_unlimited, best.cap_bytes)):
        todo = "is more than an H200 has, and plans have no cap: give --cluster or --memory-cap-gb"
        tell(f"{PROGRAM}: a peak of {format_bytes(peak)} {todo}")
    for lines in filter(None, (lines_why, chosen.lines(args))):
        say("\n" + "\n".join(lines))
    hint = advice(costs, best.placement, best.chunks, lambda _: "--layout balanced")
    if hint and args.layout not in (None, BALANCED, AUTO) and not planning_flags.has_costs_of_stages(args):
        say(f"\n{hint}")
    return 0


def _proof(best: Plan) -> str:
    """Return what has been proven of a plan, as of all that planners return (`planner.assemble`)."""
    num_actions = sum(len(step.actions) for row in best.ranks for step in row)
    caps = "none has a cap" if all(map(is_unlimited, best.cap_bytes)) else "none exceeds its cap"
    return f"checked: {num_actions:,} actions, each once and after all that it needs; ranks cannot hang, and {caps}"


def _remediable(error: InfeasibleError, args: argparse.Namespace) -> InfeasibleError:
    """Return a refusal that names the command which tries other sizes, and no larger cap than the cluster's devices have."""
    cluster = planning_flags.cluster_of(args)
    memory_gb = None if cluster is None else cluster.device_memory_gb
    if memory_gb is not None and error.least_cap_bytes > memory_gb * 2**30:
        error = error.without_remedies("cap_bytes").with_context(after=f" A device of {memory_gb:g} GiB has less.")
    return error.with_context(after=_OTHER_SIZES) if error.least_cap_bytes else error


def _planned(problem: Problem, costs: Costs, args: argparse.Namespace) -> tuple[Plan, list[str]]:
    """Plan, and with ``--why`` explain the plan. Raises `InfeasibleError` if nothing fits."""
    what = f"planning {len(problem.lengths):,} sequences with {args.planner}"
    with terminal.latest_message(terminal.EXACT_PLANNER_LOG) as latest, progress(what, latest):
        if not args.why:
            best, lines = plan_once(problem, costs, options_from(args)), []
        else:
            explanation = explain(problem, costs, options_from(args))
            best, lines = explanation.plan, why(explanation, None if args.all else args.width)
    if message := latest():
        tell(message)
    return best, lines


def _report_memory(args: argparse.Namespace, problem: Problem, costs: Costs, best: Plan, refusal: str) -> None:
    """Print what every rank holds, draw it, and tell the smallest cap without offload, which takes a plan more."""
    breakdown = memory_breakdown(best, costs)
    if args.memory_out and is_page(args.memory_out):
        save_page([Shown(args.planner, best, breakdown=breakdown)], args.memory_out)
    elif args.memory_out:
        save_picture(memory_picture(breakdown), args.memory_out)
    if not args.json:
        blocks = [report_text.headline(best), report_text.peak_table(breakdown), list(report_text.peak_lines(breakdown))]
        blocks.append(report_text.curves(breakdown, max(8, args.width - _LABEL_WIDTH)))
        if refusal:
            blocks.insert(0, [*refusal.splitlines(), "What follows is of the smallest cap that would do."])
        say("\n\n".join("\n".join(lines) for lines in blocks), flush=True)
    with progress("looking for the smallest cap"):
        smallest = _smallest_cap(problem, costs, replace(options_from(args), offload=False))
    cap_bytes, makespan_us = smallest.cap_bytes[0], smallest.predicted.makespan_us
    if args.json:
        figures = {"cap_bytes": cap_bytes, "makespan_us": makespan_us}
        say(json.dumps({"refusal": refusal, "ranks": report_text.memory_figures(breakdown), "smallest_cap": figures}, indent=1))
        return
    cap = f"{format_gib(cap_bytes, decimals=4)}, in {format_us(makespan_us)}"
    say(f"\nsmallest cap for this batch without offload (--memory-cap-gb): {cap}")


def _smallest_cap(problem: Problem, costs: Costs, options: Options) -> Plan:
    """Return the plan under the smallest cap, equal on all ranks, that the planner names."""
    try:
        return plan(replace(problem, cap_bytes=(1,) * problem.num_ranks), costs, options)
    except InfeasibleError as error:
        if not error.least_cap_bytes:
            raise
        return plan(replace(problem, cap_bytes=(error.least_cap_bytes,) * problem.num_ranks), costs, options)
