"""The command line: one function per command; ``megatron-epp --help`` lists them.

All but `profile`, `rehearse`, `prepare`, `train` and `quickstart` run without torch, Megatron or a GPU. Exit codes: 0 done;
1 `check` found violations, or `doctor` a problem; 2 an error; 70 an unforeseen one, a fault of this package; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import megatron_epp
from megatron_epp.cli import advise as cli_advise
from megatron_epp.cli import doctor as cli_doctor
from megatron_epp.cli import memory as cli_memory
from megatron_epp.cli import prepare
from megatron_epp.cli import profile as cli_profile
from megatron_epp.cli import quickstart as cli_quickstart
from megatron_epp.cli import rehearse as cli_rehearse
from megatron_epp.cli import train as cli_train
from megatron_epp.cli.compare import compare
from megatron_epp.cli.inputs import (
    PLANNER_NAMES,
    add_planner,
    add_problem,
    costs_of,
    has_costs_of_stages,
    options_of,
    problem_of,
)
from megatron_epp.cli.output import PROGRAM, finish, say, tell, tell_error, tell_traceback
from megatron_epp.cli.parser import Parser
from megatron_epp.cli.progress import progress
from megatron_epp.cli.types import PICTURES, count, output, picture, planner
from megatron_epp.cost import balance as spread
from megatron_epp.plan.check import check, report
from megatron_epp.plan.check.actions import check_presence
from megatron_epp.plan.check.lockstep import check_matched
from megatron_epp.plan.check.tables import check_hosted, check_tables, check_tokens
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import naming
from megatron_epp.plan.serialize import load, save
from megatron_epp.plan.simulate import simulate
from megatron_epp.plan.text import to_grid
from megatron_epp.planner import plan
from megatron_epp.report.gantt import save_gantt
from megatron_epp.report.measured import Measured, measured_boxes
from megatron_epp.report.table import format_bytes, format_us, table
from megatron_epp.report.text import against, summary
from megatron_epp.report.trace import save_trace

type Commands = argparse._SubParsersAction[Parser]
type Run = Callable[[argparse.Namespace], int]

_UNFORESEEN = 70
_REPORT = "a fault of megatron-epp: run it again with --debug, and report what it prints as README.md says"
_PLAN_EXAMPLE = """\
example: three sequences on a 4-stage pipeline of an 8B model (the defaults)
  megatron-epp plan --lengths 1200,88,40961 -o plan.json
a batch of 512 drawn from a file of lengths
  shuf -n 512 lengths.txt | megatron-epp plan --lengths - --pipeline-size 8 --memory-gb 40
the first 512 documents of a Megatron index, for a shipped model and cluster
  megatron-epp plan --lengths documents.idx --batch-size 512 --context 131072 \\
    --model llama3-8b --cluster h100x8 --pipeline-size 8 -o plan.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors print one or two lines on stderr, a traceback only with ``--debug``."""
    try:
        args = _parser().parse(argv)
        run: Run = args.run
        code = run(args)
        finish()
        return code
    except KeyboardInterrupt:
        tell(f"\n{PROGRAM}: interrupted")
        return 130
    except Exception as error:
        if "--debug" in (sys.argv[1:] if argv is None else argv):
            tell_traceback(error)
        return _refused(error)


def _refused(error: Exception) -> int:
    """Say what ended a command in a line or two; the exit code."""
    if isinstance(error, EppError):
        tell_error(str(error))
        return 2
    if isinstance(error, OSError):
        tell_error(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        return 2
    if isinstance(error, ImportError):
        tell_error(f"{error}; `{PROGRAM} doctor` says what is missing here")
        return 2
    what = " ".join(f"{type(error).__name__}: {error}".split())
    tell_error("; ".join([f"unforeseen {what}", *getattr(error, "__notes__", ()), _REPORT]))
    return _UNFORESEEN


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Plan elastic pipeline parallelism from sequence lengths, prove plans, and look at them.",
        epilog="`megatron-epp COMMAND --help` lists a command's options with their units and defaults.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {megatron_epp.__version__}")
    _add_debug(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_memory(commands)
    _add_check(commands)
    _add_simulate(commands)
    _add_compare(commands)
    _add_advise(commands)
    _add_show(commands)
    _add_profile(commands)
    _add_rehearse(commands)
    _add_prepare(commands)
    _add_train(commands)
    _add_quickstart(commands)
    _add_doctor(commands)
    return parser


def _command(commands: Commands, name: str, run: Run, purpose: str, epilog: str = "") -> Parser:
    description = f"{purpose[0].upper()}{purpose[1:]}."
    layout = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=purpose, description=description, epilog=epilog, formatter_class=layout)
    parser.set_defaults(run=run)
    _add_debug(parser)
    return parser


def _add_debug(parser: Parser) -> None:
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error too (default: do not)")


def _add_plan(commands: Commands) -> None:
    parser = _command(
        commands, "plan", _plan, "make a plan for a batch of sequence lengths and print its summary", _PLAN_EXAMPLE
    )
    add_problem(parser)
    add_planner(parser)
    parser.add_argument("-o", "--output", type=output, metavar="FILE", help="write the plan as JSON (default: do not)")
    _add_width(parser)


def _add_memory(commands: Commands) -> None:
    purpose = "say what memory a batch takes on every rank, of what and when, and what else would fit"
    cli_memory.add_arguments(_command(commands, "memory", cli_memory.run, purpose, cli_memory.EXAMPLE))


def _add_check(commands: Commands) -> None:
    parser = _command(commands, "check", _check, "prove a plan, or report every violation; exit code 1 when there are any")
    help_text = "one plan; or those of replicas that share experts, which must match too"
    parser.add_argument("plans", metavar="PLAN.json", nargs="+", help=help_text)


def _add_simulate(commands: Commands) -> None:
    parser = _command(commands, "simulate", _simulate, "simulate a plan and print when its ranks work and what they hold")
    parser.add_argument("plan", metavar="PLAN.json", help="what `megatron-epp plan -o` or a training run wrote")


def _add_compare(commands: Commands) -> None:
    parser = _command(commands, "compare", _compare, "plan batches with several planners and print them side by side")
    add_problem(parser, several_batches=True)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON, a row per batch and planner")
    parser.add_argument(
        "--planner",
        action="append",
        type=planner,
        metavar="NAME",
        help=f"a planner to compare, {PLANNER_NAMES}; repeat it for more (default: all that are here)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=picture,
        metavar="FILE",
        help="a picture of the plans of one batch below each other, .png, .svg or .pdf (default: none)",
    )


def _add_advise(commands: Commands) -> None:
    purpose = "search parallel sizes for a model, a cluster and lengths, and say why the others lose"
    cli_advise.add_arguments(_command(commands, "advise", cli_advise.run, purpose, cli_advise.EXAMPLE))


def _add_show(commands: Commands) -> None:
    parser = _command(commands, "show", _show, "show a plan, and a run of it, as text, picture or trace")
    parser.add_argument("plan", metavar="PLAN.json", help="what `megatron-epp plan -o` or a training run wrote")
    parser.add_argument(
        "--measured", metavar="FILE", help="a run of this plan, as the training run wrote it, to lay beside it (default: none)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=output,
        metavar="FILE",
        help="the suffix decides: .png, .svg or .pdf for a Gantt picture, .json for a trace (open it in ui.perfetto.dev), "
        ".txt for text. Without it: text on the screen",
    )
    parser.add_argument(
        "--png", type=picture, metavar="FILE", help="write a Gantt picture with the memory of every stage (default: none)"
    )
    parser.add_argument("--trace", type=output, metavar="FILE", help="write a trace for ui.perfetto.dev (default: none)")
    parser.add_argument(
        "--lowered",
        action="store_true",
        help="print what each rank issues, in order: actions, copies, sends, receives and reductions; nothing else",
    )
    _add_width(parser)


def _add_profile(commands: Commands) -> None:
    purpose = "measure a model's parts on this machine and write a cost profile (needs torch)"
    cli_profile.add_arguments(_command(commands, "profile", cli_profile.run, purpose, cli_profile.EXAMPLE))


def _add_rehearse(commands: Commands) -> None:
    purpose = "run a plan's ranks as processes of this machine, with timed waits for compute (needs torch)"
    cli_rehearse.add_arguments(_command(commands, "rehearse", cli_rehearse.run, purpose, cli_rehearse.EXAMPLE))


def _add_prepare(commands: Commands) -> None:
    purpose = "make Megatron .bin/.idx files of folders, JSONL files or single files (needs torch and Megatron)"
    prepare.add_arguments(_command(commands, "prepare", prepare.run, purpose))


def _add_train(commands: Commands) -> None:
    purpose = "train from YAML settings with Megatron's own loop (needs torch and Megatron)"
    cli_train.add_arguments(_command(commands, "train", cli_train.run, purpose, cli_train.EXAMPLE))


def _add_quickstart(commands: Commands) -> None:
    purpose = "train a small GPT with Megatron's schedule and with elastic plans, and compare (needs torch and Megatron)"
    cli_quickstart.add_arguments(_command(commands, "quickstart", cli_quickstart.run, purpose, cli_quickstart.EXAMPLE))


def _add_doctor(commands: Commands) -> None:
    purpose = "say what this machine has, lacks and should change to train; exit code 1 where it cannot"
    cli_doctor.add_arguments(_command(commands, "doctor", cli_doctor.run, purpose, cli_doctor.EXAMPLE))


def _add_width(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=count, default=120, metavar="N", help="characters per line of text (%(default)s)")
    parser.add_argument("--all", action="store_true", help="print every chunk and whole lines")


def _plan(args: argparse.Namespace) -> int:
    problem = problem_of(args)
    costs = costs_of(args, problem.lengths)
    with progress(f"planning {len(problem.lengths):,} sequences with {args.planner}"):
        made = plan(problem, costs, options_of(args, args.planner))
    if args.output:
        save(made, args.output)
    say(_summary(made, args))
    if not has_costs_of_stages(args) and (
        hint := spread.advice(costs, problem.placement, problem.lengths, "--layers-per-stage balanced")
    ):
        say(f"\n{hint}")
    return 0


def _check(args: argparse.Namespace) -> int:
    plans = list(map(load, args.plans))
    found = [check(made) for made in plans]
    for path, made, violations in zip(args.plans, plans, found, strict=True):
        say(f"{path}: {report(made, violations)}", end="")
    unmatched = [] if any(found) else check_matched(plans)
    for fault in unmatched:
        say(str(fault))
    return 1 if any(found) or unmatched else 0


def _simulate(args: argparse.Namespace) -> int:
    timeline = simulate(_load(args.plan))
    rows = []
    for rank, (starts, ends) in enumerate(zip(timeline.start_us, timeline.end_us, strict=True)):
        first, last, busy = min(starts, default=0.0), max(ends, default=0.0), timeline.busy_us[rank]
        idle = f"{1 - busy / timeline.makespan_us:.1%}" if timeline.makespan_us else "0.0%"
        rows.append([str(rank), *map(format_us, (first, last, busy)), idle, format_bytes(timeline.peak_bytes[rank])])
    say(f"makespan {format_us(timeline.makespan_us)}, bubble {timeline.bubble_fraction:.1%}\n")
    say("\n".join(table(("rank", "first start", "last end", "busy", "bubble", "peak"), rows, left=())))
    return 0


def _compare(args: argparse.Namespace) -> int:
    say(compare(args))
    return 0


def _show(args: argparse.Namespace) -> int:
    made = _load(args.plan)
    measured = _measured(made, args.measured) if args.measured else None
    if args.lowered:
        say(to_grid(lower(made)).rstrip())
    outputs = [args.output, args.png, args.trace]
    if not any(outputs) and not args.lowered:
        say(_text(made, measured, args))
    with progress("drawing"):
        for path in filter(None, outputs):
            suffix = Path(path).suffix.lower()
            if path is args.png or suffix in PICTURES:
                save_gantt(made, path, measured)
            elif path is args.trace or suffix == ".json":
                save_trace(made, path, measured)
            elif suffix == ".txt":
                Path(path).write_text(_text(made, measured, args) + "\n", encoding="utf-8")
            else:
                raise EppError(f"--output {path}: unknown suffix {suffix!r}; use {', '.join(PICTURES)}, .json or .txt")
    return 0


def _text(made: Plan, measured: Measured | None, args: argparse.Namespace) -> str:
    return _summary(made, args) if measured is None else f"{_summary(made, args)}\n\n{against(made, measured)}"


def _summary(made: Plan, args: argparse.Namespace) -> str:
    return summary(made, None, None) if args.all else summary(made, args.width)


def _load(path: str) -> Plan:
    """A plan whose tables, chunks and actions fit together; one with other violations is shown, with a word about them."""
    made = load(path)
    for check_part in (check_tables, check_tokens, check_presence, check_hosted):
        if fault := next(check_part(made), None):
            raise PlanError(f"{path}: {fault}; see: {PROGRAM} check {path}")
    if violations := check(made):
        tell(f"{PROGRAM}: warning: {len(violations)} violation(s), see: {PROGRAM} check {path}")
    return made


def _measured(made: Plan, path: str) -> Measured:
    """A run of the plan."""
    measured = Measured.load(path)
    with naming(path, PlanError):
        measured_boxes(made, measured)
    return measured


if __name__ == "__main__":
    sys.exit(main())
