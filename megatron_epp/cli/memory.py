"""The command that reports a batch's memory by item, rank and time, and the limits of what would fit."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from megatron_epp.cli.alternatives import with_alternatives
from megatron_epp.cli.inputs import EVERYDAY_PROBLEM, add_problem, costs_of, flags_of, problem_of, tell_sharing
from megatron_epp.cli.layout import settle_latents
from megatron_epp.cli.lengths import lengths_of
from megatron_epp.cli.reach import Reached, look, makespan_us, reach_table
from megatron_epp.cli.schedules import chosen_for
from megatron_epp.cli.terminal import Command, Parser, add_output, is_page, picture_or_page, progress, say
from megatron_epp.cost import PipelineCosts
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add, names_of, options_from
from megatron_epp.plan.account import Account
from megatron_epp.plan.errors import InfeasibleError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.units import format_bytes
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.limits import Limit, Limits
from megatron_epp.planner.memory.account import account_of
from megatron_epp.planner.service.worker import Worker
from megatron_epp.report.memory import curves, figures, peak_lines, peak_table, save_memory_picture
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.table import table
from megatron_epp.report.text import headline

_EXAMPLE = """\
example: before a launch, what a batch takes on 8 GPUs of 80 GB, and what else would fit
  megatron-epp memory --lengths 131072,9000,800,350,120 --model llama3-8b --cluster h100x8 \\
    --stages 8 -o memory.png
"""

_LABEL_WIDTH = 20
"""Width in characters reserved next to the curve."""
_MEGATRON_IS_LATE = "Megatron's own estimate: not there in time (--seconds); its import takes long here"
_NO_MEGATRON = "Megatron's own estimate: Megatron is not installed here"


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add_problem(parser)
    add(parser, "planner")
    drawn = "also draw it over time: .html for a page to explore, .png, .svg or .pdf for a picture (default: do not)"
    add_output(parser, drawn, type=picture_or_page)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--quick", action="store_true", help="do not look for what else would fit")
    seconds = (
        "seconds from the start after which it stops looking for what else would fit, and prints what is known (%(default)s)"
    )
    parser.add_argument("--seconds", type=COUNT, default=7, metavar="N", help=seconds)
    parser.add_argument("--no-megatron", action="store_true", help="leave out Megatron's own estimate")
    parser.add_argument("--width", type=COUNT, default=100, metavar="N", help="characters of a curve's line (%(default)s)")


def run(args: Namespace) -> int:
    """Plan, account for the plan's memory, search for limits, and print each part as soon as it is known. Raises `EppError`."""
    start_s = time.monotonic()
    lengths, options = lengths_of(args), options_from(args)
    tell_sharing(args)
    settle_latents(args, lengths)
    estimator = None if args.no_megatron or _is_unknown_to_megatron(args) else Worker(_estimator)
    chosen = chosen_for(args, lengths)
    problem, costs = problem_of(args, lengths, chosen.layout.placement), costs_of(args, lengths, chosen.layout)
    refusal = ""
    with progress(f"planning {len(problem.lengths):,} sequences with {args.planner}"):
        try:
            made = plan(problem, costs, options)
        except InfeasibleError as error:
            least = error.least_cap_bytes
            if not least:
                raise
            refusal = with_alternatives(error, args, problem.lengths).text(names_of(args.parser))
            made = plan(replace(problem, cap_bytes=tuple(max(cap, least) for cap in problem.cap_bytes)), costs, options)
    account = account_of(made, costs)
    if args.output:
        if is_page(args.output):
            save_page([Shown(args.planner, made, account=account)], args.output)
        else:
            save_memory_picture(account, args.output)
    if not args.json:
        _say_blocks(_plan_blocks(args, account, refusal))
    found = Reached({}, "") if args.quick else _reaches(args, problem, chosen.layout, options, start_s)
    if found.reaches and not args.json:
        _say_blocks([[*reach_table(found.reaches), *filter(None, [found.hint])]])
    megatron = None if args.no_megatron else _megatrons(args, problem, estimator, start_s + args.seconds)
    if args.json:
        say(json.dumps(_figures(account, refusal, found, megatron), indent=1))
        return 0
    if megatron is not None:
        _say_blocks([[megatron] if isinstance(megatron, str) else _megatron_lines(account, megatron)])
    if lines := chosen.lines():
        _say_blocks([lines])
    return 0


def _say_blocks(blocks: list[list[str]]) -> None:
    """Print blocks of lines, with an empty line after each."""
    say("\n".join("\n".join([*lines, ""]) for lines in blocks), flush=True)


def _reaches(args: Namespace, problem: Problem, layout: Layout, options: Options, start_s: float) -> Reached:
    """Search for the limits of what fits, without offload and, if it is allowed, with it."""
    choices = {"without offload": replace(options, offload=False)} | ({"with offload": options} if options.offload else {})
    uncut = Namespace(**vars(args) | {"context": None})

    def costs_for(longest: int) -> PipelineCosts:
        return costs_of(uncut, problem.lengths, layout, longest)

    limits = {name: Limits(problem, costs_for, allowed) for name, allowed in choices.items()}
    return look(limits, start_s + args.seconds, start_s)


def _is_unknown_to_megatron(args: Namespace) -> bool:
    return args.costs is not None and args.model is None


def _estimator() -> Callable[..., dict[str, Any] | None]:
    """Load Megatron's own estimator in a process of its own, while plans are made: loading takes longer than many plans."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stderr.fileno())  # for what Megatron and its libraries say of this machine
    try:
        from megatron_epp.mcore.costs.estimate import estimate
    except ImportError:
        return lambda *_: None
    return estimate


def _megatrons(args: Namespace, problem: Problem, estimator: Worker | None, end_s: float) -> dict[str, Any] | str:
    """Describe Megatron's own estimate, or why there is none."""
    if estimator is None:
        return "Megatron's own estimate: a cost profile does not tell the model; name it with --model"
    estimator.send(flags_of(args), problem.num_ranks, args.data_parallel, problem.lengths)
    try:
        with progress("asking Megatron's own estimator"):
            if not estimator.is_ready(max(0.0, end_s - time.monotonic())):
                return _MEGATRON_IS_LATE
        found: dict[str, Any] | None = estimator.receive()
    finally:
        estimator.close()
    return _NO_MEGATRON if found is None else found


def _plan_blocks(args: Namespace, account: Account, refusal: str) -> list[list[str]]:
    """Return the blocks of text about the plan itself."""
    blocks = [headline(account.timeline.plan)]
    if refusal:
        blocks = [[*refusal.splitlines(), "What follows is of the least cap that would do."], *blocks]
    return [*blocks, peak_table(account), list(peak_lines(account)), curves(account, max(8, args.width - _LABEL_WIDTH))]


def _megatron_lines(account: Account, megatron: dict[str, Any]) -> list[str]:
    peak = account.peak(0)
    static = account.timeline.plan.static_bytes[0]
    rows = [
        ["weights, gradients, optimizer", format_bytes(megatron["state_bytes"]), format_bytes(static)],
        ["all that comes with a batch", format_bytes(megatron["activation_bytes"]), format_bytes(peak.num_bytes - static)],
    ]
    return [
        *table(("of rank 0", "Megatron's estimate", "this plan"), rows),
        f"Megatron's is of {megatron['microbatches']:,} microbatches of {megatron['tokens']:,} tokens each in its own 1F1B, "
        "without recompute of whole layers.",
        "It knows no slices, packing, caches of keys and values, or caps, and no optimizer but Adam in fp32; it is told to",
        "shard that over replicas and context-parallel ranks, as Megatron does. The plan's static bytes have room for passes.",
    ]


def _figures(account: Account, refusal: str, found: Reached, megatron: dict[str, Any] | str | None) -> dict[str, Any]:
    def limit(one: Limit | None) -> dict[str, Any] | None:
        return None if one is None else asdict(one)

    limits = {
        name: {
            "longest_sequence_alone": limit(reach.alone),
            "longest_sequence_beside": limit(reach.with_rest),
            "largest_batch": limit(reach.batch),
            "smallest_cap_bytes": limit(reach.cap),
            "smallest_cap_makespan_us": makespan_us(reach),
        }
        for name, reach in found.reaches.items()
    }
    return {"refusal": refusal, "ranks": figures(account), "limits": limits, "hint": found.hint, "megatron": megatron}


_PURPOSE = "say what memory a batch takes on every rank, of what and when, and what else would fit"
COMMAND = Command("memory", _PURPOSE, add_arguments, run, _EXAMPLE, (*EVERYDAY_PROBLEM, "--quick", "--output"))
