"""The command that emulates a plan on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_epp.cli.terminal import Command, Parser, add_output, progress, say
from megatron_epp.mcore.arguments.flag import AMOUNT
from megatron_epp.plan.check import check
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.serialize import load
from megatron_epp.plan.simulate import simulate
from megatron_epp.report.measured import Measured
from megatron_epp.report.text import format_us

_EXAMPLE = """\
example: eight ranks of an 8B model, emulated, and both laid side by side
  megatron-epp plan --lengths 60000,900,88 --stages 8 -o plan.json
  megatron-epp emulate plan.json -o measured.json
  megatron-epp show plan.json --measured measured.json --png both.png
"""
_ACTION_US = 200_000.0
"""Mean length of an action, in microseconds, for which this machine's overhead is small."""
_LONGEST_US = 60e6
"""Longest emulation in microseconds, unless asked for."""


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument("plan", metavar="PLAN.json", help="what `megatron-epp plan -o` or a training run wrote")
    parser.add_argument(
        "--time-scale",
        type=AMOUNT,
        metavar="X",
        help="seconds slept per planned second; more makes this machine's overhead count less "
        f"(default: actions of {_ACTION_US / 1e3:.0f} ms on average, but no more than {_LONGEST_US / 1e6:.0f} s in all)",
    )
    parser.add_argument("--timeout", type=AMOUNT, metavar="S", help="give up after so many seconds (default: by the plan)")
    add_output(parser, "write when every action ran, for `show --measured` (default: do not)")


def run(args: argparse.Namespace) -> int:
    """Emulate the plan and print measured against simulated times. Raises `EppError`."""
    plan = load(args.plan)
    if faults := check(plan):
        raise PlanError(f"{args.plan}: {faults[0].reason}; see `megatron-epp check {args.plan}`")
    from megatron_epp.contrib.demos.emulate import emulate

    simulated_us = simulate(plan).makespan_us
    scale = _scale(plan, simulated_us) if args.time_scale is None else args.time_scale
    timeout_s = args.timeout or 60 + 5 * plan.num_ranks + 3 * simulated_us * scale / 1e6
    with progress(f"emulating {plan.num_ranks} ranks for {simulated_us * scale / 1e6:.0f} s"):
        emulated = emulate(plan, scale, timeout_s)
    measured = Measured.of(plan, emulated.events)
    if args.output:
        measured.save(Path(args.output))
    actions = sum(map(len, plan.ranks))
    say(
        f"{plan.num_ranks} ranks, {actions} actions, {scale:.4g} seconds slept per planned second\n"
        f"makespan: simulated {format_us(simulated_us)}, measured {format_us(measured.makespan_us)} "
        f"({measured.makespan_us / simulated_us - 1:+.2%})\n"
        f"overhead: {format_us(emulated.late_us)} per action on this machine's clock, next to "
        f"{format_us(simulated_us * scale * plan.num_ranks / actions)} of makespan"
    )
    return 0


def _scale(plan: Plan, simulated_us: float) -> float:
    times = [step.time_us for steps in plan.ranks for step in steps]
    if not (total_us := sum(times)):
        return 1.0
    return min(_ACTION_US * len(times) / total_us, _LONGEST_US / simulated_us)


_PURPOSE = "run a plan's ranks as processes of this machine, with timed waits for compute (needs torch)"
COMMAND = Command("emulate", _PURPOSE, add_arguments, run, _EXAMPLE)
