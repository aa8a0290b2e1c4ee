"""The command that emulates a plan on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_epp.mcore.arguments.flag import AMOUNT
from megatron_epp.plan.document import digest
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.proof import check
from megatron_epp.plan.serialize import load
from megatron_epp.plan.simulation import simulate
from megatron_epp.tools.cli.terminal import Parser, add_output, progress, say
from megatron_epp.tools.report.text import format_us

EXAMPLE = """\
example: eight ranks of an 8B model, emulated, and both laid side by side
  megatron-epp plan --lengths 60000,900,88 --stages 8 -o plan.json
  megatron-epp emulate plan.json -o measured.json
  megatron-epp show plan.json --measured measured.json -o both.png
"""
_USUAL_S = 20.0
"""Length of an emulation unless asked for: actions of an ordinary plan take so long that this machine's overhead is small."""


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("plan", metavar="PLAN.json", help="what `megatron-epp plan -o` or a training run wrote")
    scale = (
        f"seconds slept per planned second; with more this machine's overhead counts less (default: {_USUAL_S:.0f} s in all)"
    )
    parser.add_argument("--time-scale", type=AMOUNT, metavar="X", help=scale)
    add_output(parser, "write when every action ran, for `show --measured` (default: do not)")


def run(args: argparse.Namespace) -> int:
    """Emulate the plan and print measured against simulated times. Raises `EppError`."""
    plan = load(args.plan)
    if faults := check(plan):
        raise PlanError(f"{args.plan}: {faults[0].reason}; see `megatron-epp check {args.plan}`")
    from megatron_epp.contrib.demos.emulate import emulate

    simulated_us = simulate(plan).makespan_us
    scale = args.time_scale or (_USUAL_S * 1e6 / simulated_us if simulated_us else 1.0)
    time_s = simulated_us * scale / 1e6
    with progress(f"emulating {plan.num_ranks} ranks for {time_s:.0f} s"):
        measured = Measured.of(digest(plan), emulate(plan, scale, timeout_s=60 + 5 * plan.num_ranks + 3 * time_s))
    if args.output:
        measured.save(Path(args.output))
    say(
        f"{plan.num_ranks} ranks, {sum(map(len, plan.ranks))} actions, {scale:.4g} seconds slept per planned second\n"
        f"makespan: simulated {format_us(simulated_us)}, measured {format_us(measured.makespan_us)} "
        f"({measured.makespan_us / simulated_us - 1:+.2%})"
    )
    return 0
