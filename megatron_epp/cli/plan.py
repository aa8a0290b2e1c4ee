"""The commands that make and read plans: `plan` makes one, `check` proves it, `simulate` tells its times."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from megatron_epp.cli.alternatives import alternatives, kept_remedies
from megatron_epp.cli.inputs import add_problem, costs_of, has_costs_of_stages, problem_of, tell_sharing
from megatron_epp.cli.layout import AUTO, chosen_layout
from megatron_epp.cli.lengths import lengths_of
from megatron_epp.cli.schedules import chosen_for
from megatron_epp.cli.terminal import (
    ERROR,
    EXACT,
    PROGRAM,
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
from megatron_epp.cost import Costs
from megatron_epp.cost.balance import advice
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add, names_of, options_from
from megatron_epp.plan.check import check, report
from megatron_epp.plan.check.actions import check_presence
from megatron_epp.plan.check.lockstep import check_lockstep
from megatron_epp.plan.check.tables import check_kv_offload, check_tables, check_tokens
from megatron_epp.plan.check.violation import Violation
from megatron_epp.plan.columns import columns_of, listed
from megatron_epp.plan.errors import InfeasibleError, PlanError
from megatron_epp.plan.launches import Rows
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.reading import naming, read_text
from megatron_epp.plan.serialize import load, save
from megatron_epp.plan.simulate import simulate
from megatron_epp.plan.units import format_bytes
from megatron_epp.plan.writing import write_text
from megatron_epp.planner import Problem, plan
from megatron_epp.report.table import format_us, table
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


def _add_plan(parser: Parser) -> None:
    add_problem(parser)
    add(parser, "planner")
    add_output(parser, "write the plan as JSON (default: do not)")
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
    chosen = chosen_for(args.planner, chosen_layout(args, [lengths]))
    layout = chosen.layout
    problem, costs = problem_of(args, lengths, layout.placement), costs_of(args, lengths, layout)
    if (made := _planned(problem, costs, args)) is None:
        return ERROR
    if args.output:
        save(made, args.output)
    if args.layout_out:
        write_text(args.layout_out, layout.to_json())
    say(text_of(made, args))
    if lines := chosen.lines():
        say("\n" + "\n".join(lines))
    hint = advice(costs, problem.placement, problem.lengths, lambda _: "--layout balanced")
    if hint and args.layout != AUTO and not has_costs_of_stages(args):
        say(f"\n{hint}")
    return 0


def _planned(problem: Problem, costs: Costs, args: argparse.Namespace) -> Plan | None:
    """Plan; None if nothing fits, once that and what would fit is told."""
    try:
        what = f"planning {len(problem.lengths):,} sequences with {args.planner}"
        with latest_message(EXACT) as latest, progress(what, latest):
            made = plan(problem, costs, options_from(args))
    except InfeasibleError as error:
        tell_error(kept_remedies(error, args).text(names_of(args.parser)))  # before what else would fit, which takes longer
        if line := alternatives(error, args, problem.lengths):
            tell(line)
        return None
    if message := latest():
        tell(message)
    return made


def add_plan_file(parser: Parser) -> None:
    """Add the plan file that a command reads."""
    parser.add_argument("plan", metavar="PLAN.json", help="what `megatron-epp plan -o` or a training run wrote")


def _add_plans(parser: Parser) -> None:
    help_text = (
        "one plan, or a table that torch.distributed.pipelining (.csv), zero-bubble or Primus print; or plans of replicas that "
        "share experts"
    )
    parser.add_argument("plans", metavar="PLAN.json", nargs="+", help=help_text)


def _check(args: argparse.Namespace) -> int:
    tables = [_read(path) for path in args.plans]
    plans, found = [made for made, _ in tables], [check(*table) for table in tables]
    for path, (made, rows), violations in zip(args.plans, tables, found, strict=True):
        say(f"{path}: {report(made, violations)}", end="")
        if rows is not None and not violations:
            num_messages = sum(map(len, rows)) - sum(len(step.actions) for row in made.ranks for step in row)
            say(f"its own {num_messages} sends and receives cannot hang, not even on one hardware queue")
        if made.planner in foreign().SOURCES and not violations:
            peaks = made.predicted.peak_bytes
            say(
                f"bubble {made.predicted.bubble_fraction:.1%} if F, B and W take equally long; rank {peaks.index(max(peaks))} "
                f"keeps most, {max(peaks)} microbatches of a stage"
            )
    unmatched = [] if any(found) else check_lockstep(plans)
    for fault in unmatched:
        say(str(fault))
    return 1 if any(found) or unmatched else 0


def foreign() -> Any:
    """Import the readers of tables that other systems print: `SOURCES`, `is_table`, `from_table` and `launches_of`."""
    return importlib.import_module("megatron_epp.contrib.foreign")


def _read(path: str) -> tuple[Plan, Rows | None]:
    """Load a plan, or a table of another system as one, with the launches that the table has itself."""
    with naming(path):
        text = read_text(path)
        tables = foreign()
        if tables.is_table(path, text):
            return tables.from_table(text), tables.launches_of(text)
        if text.strip() and text.lstrip()[0] not in "{[" and not path.endswith(".json"):
            raise PlanError(
                "neither a plan, which is JSON, nor a table: no line is a row of rank 0, such as `f0 b0`, `F0.1 BW0.1` or "
                "`Rank 0: (F|0|0)`, and a table with a row of cells such as 0F0,0B0 for each rank is a .csv"
            )
    return load(path), None


def _simulate(args: argparse.Namespace) -> int:
    timeline = simulate(load_sound(args.plan))
    rows = []
    for rank, (starts, ends) in enumerate(zip(timeline.start_us, timeline.end_us, strict=True)):
        first, last, busy = min(starts, default=0.0), max(ends, default=0.0), timeline.busy_us[rank]
        idle = f"{1 - busy / timeline.makespan_us:.1%}" if timeline.makespan_us else "0.0%"
        rows.append([str(rank), *map(format_us, (first, last, busy)), idle, format_bytes(timeline.peak_bytes[rank])])
    say(f"makespan {format_us(timeline.makespan_us)}, bubble {timeline.bubble_fraction:.1%}\n")
    say("\n".join(table(("rank", "first start", "last end", "busy", "bubble", "peak"), rows, left=())))
    return 0


def load_sound(path: str) -> Plan:
    """Load a plan. Refuse one that deadlocks or contradicts itself in tables, chunks and actions; warn of other violations."""
    made = load(path)
    if fault := next(_contradictions(made), None):
        raise PlanError(f"{path}: {fault}; see: {PROGRAM} check {path}")
    if violations := check(made):
        with naming(path, PlanError):
            simulate(made)
        tell(f"{PROGRAM}: warning: {len(violations)} violation(s), see: {PROGRAM} check {path}")
    return made


def _contradictions(made: Plan) -> Iterator[Violation]:
    columns = columns_of(made)
    yield from check_tables(made, columns)
    yield from check_tokens(made)
    yield from check_presence(made, columns, listed(made, columns))
    yield from check_kv_offload(made)


COMMANDS = (
    Command("plan", "make a plan for a batch of sequence lengths and print its summary", _add_plan, _plan, _EXAMPLE),
    Command("check", "prove a plan, or report every violation; exit code 1 when there are any", _add_plans, _check),
    Command("simulate", "simulate a plan and print when its ranks work and what they hold", add_plan_file, _simulate),
)
