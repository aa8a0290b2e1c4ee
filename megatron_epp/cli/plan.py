"""The command that makes plans."""

from __future__ import annotations

import argparse

from megatron_epp.cli.alternatives import alternatives, kept_remedies
from megatron_epp.cli.inputs import EVERYDAY_PROBLEM, add_problem, costs_of, has_costs_of_stages, problem_of, tell_sharing
from megatron_epp.cli.layout import AUTO, BALANCED, settle_latents
from megatron_epp.cli.lengths import lengths_of
from megatron_epp.cli.schedules import chosen_for, planners_section
from megatron_epp.cli.terminal import (
    ERROR,
    EXACT_PLANNER_LOG,
    Command,
    Parser,
    add_output,
    latest_message,
    output,
    progress,
    say,
    tell,
    tell_error,
)
from megatron_epp.cli.why import why
from megatron_epp.cost import Costs
from megatron_epp.cost.balance import advice
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add, names_of, options_from
from megatron_epp.plan.errors import InfeasibleError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.serialize import save
from megatron_epp.plan.writing import write_text
from megatron_epp.planner import Problem, plan
from megatron_epp.planner.why import explain
from megatron_epp.report.text import summary

_EXAMPLE = """\
example: three sequences on a 4-stage pipeline of an 8B model (the defaults)
  megatron-epp plan --lengths 1200,88,40961 -o plan.json
a batch of 512 drawn from a file of lengths
  shuf -n 512 lengths.txt | megatron-epp plan --lengths - --stages 8 --memory-cap-gb 40
the first 512 documents of a Megatron index, for a shipped model and cluster
  megatron-epp plan --lengths documents.idx --batch-size 512 --context 131072 \\
    --model llama3-8b --cluster h100x8 --stages 8 -o plan.json
"""


def _add_plan(parser: Parser) -> None:
    add_problem(parser)
    add(parser, "planner")
    add_output(parser, "write the plan as JSON (default: do not)")
    parser.add_argument("--why", action="store_true", help="print how the search came to the plan, and what else it tried")
    parser.add_argument("--layout-out", type=output, metavar="FILE", help="write the layout as JSON (default: do not)")
    add_width(parser)


def add_width(parser: Parser) -> None:
    """Add the flags for the size of a plan's text."""
    parser.add_argument("--width", type=COUNT, default=120, metavar="N", help="characters per line of text (%(default)s)")
    parser.add_argument("--all", action="store_true", help="print every chunk and whole lines")


def text_of(made: Plan, args: argparse.Namespace) -> str:
    """Format a plan for a terminal, as wide as `add_width`'s flags say."""
    return summary(made, None, None) if args.all else summary(made, args.width)


def _plan(args: argparse.Namespace) -> int:
    lengths = lengths_of(args)
    tell_sharing(args)
    settle_latents(args, lengths)
    chosen = chosen_for(args, lengths)
    layout = chosen.layout
    problem, costs = problem_of(args, lengths, layout.placement), costs_of(args, lengths, layout)
    if (explained := _planned(problem, costs, args)) is None:
        return ERROR
    made, lines_why = explained
    if args.output:
        save(made, args.output)
    if args.layout_out:
        write_text(args.layout_out, layout.to_json())
    say(text_of(made, args))
    if lines_why:
        say("\n" + "\n".join(lines_why))
    if lines := chosen.lines():
        say("\n" + "\n".join(lines))
    hint = advice(costs, problem.placement, problem.lengths, lambda _: "--layout balanced")
    if hint and args.layout not in (None, BALANCED, AUTO) and not has_costs_of_stages(args):
        say(f"\n{hint}")
    return 0


def _planned(problem: Problem, costs: Costs, args: argparse.Namespace) -> tuple[Plan, list[str]] | None:
    """Plan, and with ``--why`` explain the plan; return None if nothing fits, after printing why and what would fit."""
    try:
        what = f"planning {len(problem.lengths):,} sequences with {args.planner}"
        with latest_message(EXACT_PLANNER_LOG) as latest, progress(what, latest):
            if not args.why:
                made, lines = plan(problem, costs, options_from(args)), []
            else:
                explanation = explain(problem, costs, options_from(args))
                made, lines = explanation.plan, why(explanation, None if args.all else args.width)
    except InfeasibleError as error:
        tell_error(kept_remedies(error, args).text(names_of(args.parser)))  # before what else would fit, which takes longer
        if line := alternatives(error, args, problem.lengths):
            tell(line)
        return None
    if message := latest():
        tell(message)
    return made, lines


_PURPOSE = "make a plan for a batch of sequence lengths and print its summary"
COMMAND = Command("plan", _PURPOSE, _add_plan, _plan, _EXAMPLE, (*EVERYDAY_PROBLEM, "--planner", "--output"), planners_section)
