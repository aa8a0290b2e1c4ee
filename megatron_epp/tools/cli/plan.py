"""The command that makes plans."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_epp.cost.balance import advice
from megatron_epp.cost.model import Costs
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add, names_of, options_from
from megatron_epp.plan.errors import EppError, InfeasibleError
from megatron_epp.plan.plan import Plan, is_unlimited
from megatron_epp.plan.serialize import save
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.plan.writing import write_text
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.why import explain
from megatron_epp.tools.cli.layout_flag import AUTO, BALANCED, settle_latents
from megatron_epp.tools.cli.lengths import lengths_of
from megatron_epp.tools.cli.planning_flags import (
    add_problem,
    cluster_of,
    costs_of,
    has_costs_of_stages,
    problem_of,
    tell_sharing,
)
from megatron_epp.tools.cli.schedules import chosen_for
from megatron_epp.tools.cli.terminal import (
    EXACT_PLANNER_LOG,
    PAGE,
    PICTURES,
    PROGRAM,
    Command,
    Parser,
    add_output,
    is_page,
    latest_message,
    output,
    picture_or_page,
    progress,
    say,
    tell,
)
from megatron_epp.tools.cli.why_text import why
from megatron_epp.tools.report.gantt import memory_picture, save_picture
from megatron_epp.tools.report.page.data import Shown
from megatron_epp.tools.report.page.html import save_page
from megatron_epp.tools.report.text import curves, format_us, headline, memory_figures, peak_lines, peak_table, summary

_EXAMPLE = """\
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

_LARGEST_DEVICE_BYTES = 141 << 30  # memory of the largest device of shipped clusters, an H200's
_OTHER_SIZES = "\n`megatron-epp advise` tries sizes, layouts and contexts, and prints what fits."
_LABEL_WIDTH = 20  # width in characters reserved next to a curve of memory


def _add_plan(parser: Parser) -> None:
    add_problem(parser)
    add(parser, "planner")
    add_output(parser, "write the plan as JSON (default: do not)")
    switch = partial(parser.add_argument, action="store_true")
    switch("--why", help="print how the search came to the plan, why ranks recompute, and what other values would give")
    switch("--memory", help="print what every rank holds at its peak, part by part, and the smallest cap that would do")
    drawn = "draw memory over time, as .html to explore, .png, .svg or .pdf (default: do not)"
    parser.add_argument("--memory-out", type=picture_or_page, metavar="FILE", help=drawn)
    switch("--json", help="with --memory, print its figures as JSON")
    parser.add_argument("--layout-out", type=output, metavar="FILE", help="write the layout as JSON (default: do not)")
    add_width(parser)


def add_width(parser: Parser) -> None:
    parser.add_argument("--width", type=COUNT, default=120, metavar="N", help="characters per line of text (%(default)s)")
    parser.add_argument("--all", action="store_true", help="print every chunk and whole lines")


def text_of(plan_of_batch: Plan, args: argparse.Namespace) -> str:
    """Format a plan for a terminal, as wide as `add_width`'s flags say."""
    return summary(plan_of_batch, None, None) if args.all else summary(plan_of_batch, args.width)


def _plan(args: argparse.Namespace) -> int:
    if args.output and Path(args.output).suffix.lower() in (*PICTURES, PAGE):
        drawn = "--memory-out draws its memory, `megatron-epp show` its times"
        raise EppError(f"{args.output}: a plan is written as JSON; {drawn}")
    lengths = lengths_of(args)
    tell_sharing(args)
    settle_latents(args, [lengths])
    chosen = chosen_for(args, lengths)
    layout = chosen.layout
    problem, costs = problem_of(args, lengths, layout.placement), costs_of(args, lengths, layout)
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
    if args.output and refusal:  # the plan shown is of a larger cap
        tell(f"{args.output} is not written: nothing fits the cap")
    elif args.output:
        save(best, args.output)
    if args.layout_out:
        write_text(args.layout_out, layout.to_json())
    if args.memory or args.memory_out:
        _report_memory(args, problem, costs, best, refusal)
    else:
        say(text_of(best, args))
    if args.json:
        return 0
    _tell_too_large(best)
    if lines_why:
        say("\n" + "\n".join(lines_why))
    if lines := chosen.lines(args):
        say("\n" + "\n".join(lines))
    hint = advice(costs, problem.placement, problem.lengths, lambda _: "--layout balanced")
    if hint and args.layout not in (None, BALANCED, AUTO) and not has_costs_of_stages(args):
        say(f"\n{hint}")
    return 0


def _remediable(error: InfeasibleError, args: argparse.Namespace) -> InfeasibleError:
    """Return a refusal that names the command which tries other sizes, and no larger cap than the cluster's devices have."""
    cluster = cluster_of(args)
    memory_gb = None if cluster is None else cluster.device_memory_gb
    if memory_gb is not None and error.least_cap_bytes > memory_gb * 2**30:
        error = error.without_remedies("cap_bytes").with_context(after=f" A device of {memory_gb:g} GiB has less.")
    return error.with_context(after=_OTHER_SIZES) if error.least_cap_bytes else error


def _tell_too_large(best: Plan) -> None:
    """Hint at the flags of a cap if there is none and no device holds the plan."""
    peak = max(best.predicted.peak_bytes)
    if peak > _LARGEST_DEVICE_BYTES and all(map(is_unlimited, best.cap_bytes)):
        todo = "is more than an H200 has, and plans have no cap: give --cluster or --memory-cap-gb"
        tell(f"{PROGRAM}: a peak of {format_bytes(peak)} {todo}")


def _planned(problem: Problem, costs: Costs, args: argparse.Namespace) -> tuple[Plan, list[str]]:
    """Plan, and with ``--why`` explain the plan. Raises `InfeasibleError` if nothing fits."""
    what = f"planning {len(problem.lengths):,} sequences with {args.planner}"
    with latest_message(EXACT_PLANNER_LOG) as latest, progress(what, latest):
        if not args.why:
            best, lines = plan(problem, costs, options_from(args)), []
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
        blocks = [headline(best), peak_table(breakdown), list(peak_lines(breakdown))]
        blocks.append(curves(breakdown, max(8, args.width - _LABEL_WIDTH)))
        if refusal:
            blocks.insert(0, [*refusal.splitlines(), "What follows is of the smallest cap that would do."])
        say("\n\n".join("\n".join(lines) for lines in blocks), flush=True)
    with progress("looking for the smallest cap"):
        smallest = _smallest_cap(problem, costs, replace(options_from(args), offload=False))
    cap_bytes, makespan_us = smallest.cap_bytes[0], smallest.predicted.makespan_us
    if args.json:
        figures = {"cap_bytes": cap_bytes, "makespan_us": makespan_us}
        say(json.dumps({"refusal": refusal, "ranks": memory_figures(breakdown), "smallest_cap": figures}, indent=1))
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


_PURPOSE = "make a plan for a batch of sequence lengths and print its summary"
COMMAND = Command("plan", _PURPOSE, _add_plan, _plan, _EXAMPLE)
