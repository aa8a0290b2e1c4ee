"""The command that plans a batch, and what commands that show a plan as text have in common."""

from __future__ import annotations

import argparse

from megatron_epp.cli.inputs import add_problem, costs_of, has_costs_of_stages, options_of, problem_of
from megatron_epp.cli.output import progress, say
from megatron_epp.cli.parser import Command, Parser, add_output
from megatron_epp.cost.balance import advice
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.serialize import save
from megatron_epp.planner import plan
from megatron_epp.report.text import summary

_EXAMPLE = """\
example: three sequences on a 4-stage pipeline of an 8B model (the defaults)
  megatron-epp plan --lengths 1200,88,40961 -o plan.json
a batch of 512 drawn from a file of lengths
  shuf -n 512 lengths.txt | megatron-epp plan --lengths - --pipeline-size 8 --memory-gb 40
the first 512 documents of a Megatron index, for a shipped model and cluster
  megatron-epp plan --lengths documents.idx --batch-size 512 --context 131072 \\
    --model llama3-8b --cluster h100x8 --pipeline-size 8 -o plan.json
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add_problem(parser)
    add(parser, "planner")
    add_output(parser, "write the plan as JSON (default: do not)")
    add_width(parser)


def add_width(parser: Parser) -> None:
    """Add the flags for the size of a plan's text."""
    parser.add_argument("--width", type=COUNT, default=120, metavar="N", help="characters per line of text (%(default)s)")
    parser.add_argument("--all", action="store_true", help="print every chunk and whole lines")


def text_of(made: Plan, args: argparse.Namespace) -> str:
    """Format a plan for a terminal, as wide as `add_width`'s flags say."""
    return summary(made, None, None) if args.all else summary(made, args.width)


def run(args: argparse.Namespace) -> int:
    """Plan, write, and print. Raises `EppError`."""
    problem = problem_of(args)
    costs = costs_of(args, problem.lengths)
    with progress(f"planning {len(problem.lengths):,} sequences with {args.planner}"):
        made = plan(problem, costs, options_of(args))
    if args.output:
        save(made, args.output)
    say(text_of(made, args))
    hint = advice(costs, problem.placement, problem.lengths, lambda _: "--layers-per-stage balanced")
    if hint and not has_costs_of_stages(args):
        say(f"\n{hint}")
    return 0


COMMAND = Command("plan", "make a plan for a batch of sequence lengths and print its summary", add_arguments, run, _EXAMPLE)
