"""The command that shows a plan, and runs of it: as text, page, picture or trace; its proof, its times."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from megatron_epp.plan.boxes import measured_boxes
from megatron_epp.plan.columns import columns_of, listed
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.launches import Rows
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.proof import check, report
from megatron_epp.plan.proof.actions import check_presence
from megatron_epp.plan.proof.lockstep import check_lockstep
from megatron_epp.plan.proof.plan_tables import check_kv_offload, check_tables, check_tokens
from megatron_epp.plan.reading import naming_file, read_text
from megatron_epp.plan.serialize import from_json, load
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.trace import save_trace
from megatron_epp.plan.units import format_bytes
from megatron_epp.plan.violation import Violation
from megatron_epp.plan.writing import write_text
from megatron_epp.tools.cli import terminal
from megatron_epp.tools.cli.plan import add_width, text_of
from megatron_epp.tools.cli.terminal import PROGRAM, Parser, is_page, progress, say, tell
from megatron_epp.tools.report.gantt import save_gantt
from megatron_epp.tools.report.page.html import Shown, save_page
from megatron_epp.tools.report.text import against, format_us, table

EXAMPLE = """\
example: a page with zoom, memory, and what every idle rank waits for; any browser opens it
  megatron-epp show plan.json -o plan.html
iteration 3 of a training with --epp-report-dir runs/tiny --epp-trace 3, planned and measured
  megatron-epp show runs/tiny -o iteration.html
in a script: go on with a sound plan only
  megatron-epp show plan.json --proof || exit 1
"""
_READERS = [f"megatron_epp.contrib.foreign:{name}" for name in ("is_table", "from_table", "launches_of")]
"""Functions that read tables that other systems print, imported for a file that is no JSON."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "plans",
        metavar="PLAN.json",
        nargs="+",
        help="what `megatron-epp plan -o` or a training run wrote, or the folder of a run with --epp-trace (--epp-report-dir). "
        "Several: to compare them on a page, or to prove plans of replicas that share experts. --proof also takes tables of "
        "torch.distributed.pipelining (.csv), zero-bubble or Primus",
    )
    switch = partial(parser.add_mutually_exclusive_group().add_argument, action="store_true")
    switch("--proof", help="prove the plan, or report every violation; exit code 1 when there are any")
    switch("--times", help="simulate the plan and print when each rank works, and the most it holds")
    switch("--lowered", help="print what each rank issues, in order: actions, copies, sends, receives and reductions")
    run_of_it = "a run of this plan, as training wrote it, to draw next to it (default: none; of a folder, its own)"
    parser.add_argument("--measured", metavar="FILE", help=run_of_it)
    formats = ".html for a page to explore, .png, .svg or .pdf for a Gantt picture with the memory of every stage, .json for a "
    formats += "trace (for ui.perfetto.dev), .txt; repeat it for more; without it text on the screen"
    terminal.add_output(parser, formats, action="append", default=[])
    add_width(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, or write what the flags name; return the exit code. Raises `EppError`."""
    if args.proof or args.times:
        if args.output or args.measured:
            raise EppError(f"{'--proof' if args.proof else '--times'} prints and draws nothing: leave out the other flags")
        return _prove(args.plans) if args.proof else _tell_times(args.plans)
    shown = _shown(args)
    if len(shown) > 1 and not (args.output and all(map(is_page, args.output))):
        names = ", ".join(view.name for view in shown)
        raise EppError(f"there are several plans ({names}): name one, or write a page of all with -o page{terminal.PAGE}")
    first = shown[0]
    if args.lowered:
        say(to_grid(lower(first.plan)).rstrip())
    if not args.output and not args.lowered:
        say(_text(first, args))
    with progress("drawing"):
        for path in args.output:
            _write(path, shown, args)
    return 0


def _prove(paths: list[str]) -> int:
    """Prove plans and print the results; return 1 if one has violations, or they do not match, else 0."""
    tables = [_read(path) for path in paths]
    plans, violations_of_plans = [table.plan for table in tables], [check(table.plan, table.launches) for table in tables]
    for path, (plan, rows, is_table), violations in zip(paths, tables, violations_of_plans, strict=True):
        say(f"{path}: {report(plan, violations)}", end="")
        if rows is not None and not violations:
            num_messages = sum(map(len, rows)) - sum(len(step.actions) for row in plan.ranks for step in row)
            say(f"its own {num_messages} sends and receives cannot hang, not even on one hardware queue")
        if is_table and not violations:
            peaks, bubble = plan.predicted.peak_bytes, f"bubble {plan.predicted.bubble_fraction:.1%}"
            most = f"rank {peaks.index(max(peaks))} keeps most, {max(peaks)} microbatches of a stage"
            say(f"{bubble} if F, B and W take equally long; {most}")
    unmatched = [] if any(violations_of_plans) else check_lockstep(plans)
    for fault in unmatched:
        say(str(fault))
    return 1 if any(violations_of_plans) or unmatched else 0


def _tell_times(paths: list[str]) -> int:
    if len(paths) > 1:
        raise EppError(f"there are several plans ({', '.join(paths)}): simulate one")
    timeline, rows = simulate(_load_sound(paths[0])), []
    for rank, (starts, ends) in enumerate(zip(timeline.start_us, timeline.end_us, strict=True)):
        first, last, busy = min(starts, default=0.0), max(ends, default=0.0), timeline.busy_us[rank]
        idle = f"{1 - busy / timeline.makespan_us:.1%}" if timeline.makespan_us else "0.0%"
        rows.append([str(rank), *map(format_us, (first, last, busy)), idle, format_bytes(timeline.peak_bytes[rank])])
    say(f"makespan {format_us(timeline.makespan_us)}, bubble {timeline.bubble_fraction:.1%}\n")
    say("\n".join(table(("rank", "first start", "last end", "busy", "bubble", "peak"), rows, left=())))
    return 0


def _write(path: str, shown: list[Shown], args: argparse.Namespace) -> None:
    """Write plans to a file whose suffix selects the format, all of them to a page and else the first."""
    first, suffix = shown[0], Path(path).suffix.lower()
    if suffix == ".json":
        save_trace(first.plan, path, first.measured)
    elif is_page(path):
        save_page(shown, path)
    elif suffix in terminal.PICTURES:
        save_gantt(first.plan, path, first.measured)
    elif suffix == ".txt":
        write_text(path, _text(first, args) + "\n")
    else:
        known = ", ".join((terminal.PAGE, *terminal.PICTURES))
        raise EppError(f"--output {path}: unknown suffix {suffix!r}; use {known}, .json or .txt")


def _text(shown: Shown, args: argparse.Namespace) -> str:
    text = text_of(shown.plan, args)
    return text if shown.measured is None else f"{text}\n\n{against(shown.plan, shown.measured)}"


def _shown(args: argparse.Namespace) -> list[Shown]:
    if args.measured and (len(args.plans) > 1 or Path(args.plans[0]).is_dir()):
        raise EppError(f"--measured {args.measured} is a run of one plan: name that plan alone, and no folder")
    views: list[Shown] = []
    for path in map(Path, args.plans):
        views += _of_folder(path) if path.is_dir() else [_load(path, Path(args.measured) if args.measured else None)]
    return views


def _of_folder(path: Path) -> list[Shown]:
    plans = sorted(path.glob("plan*.json"), key=lambda path_of_plan: (len(path_of_plan.name), path_of_plan.name))
    if not plans:
        raise PlanError(f"{path} has no plan.json: a training run writes it with --epp-report-dir and --epp-trace ITERATION")
    runs = [path / path_of_plan.name.replace("plan", "measured", 1) for path_of_plan in plans]
    return [_load(plan, run if run.exists() else None) for plan, run in zip(plans, runs, strict=True)]


def _load(path: Path, measured_path: Path | None) -> Shown:
    plan, measured = _load_sound(str(path)), None
    if measured_path is not None:
        measured = Measured.load(measured_path)
        with naming_file(measured_path, PlanError):
            measured_boxes(plan, measured)
    return Shown(path.stem, plan, measured)


class _Proven(NamedTuple):
    plan: Plan  # of the file, or as which a table is read
    launches: Rows | None = None  # that a table has itself; None if lowering adds them
    is_table: bool = False  # the file is a table of another system


def _read(path: str) -> _Proven:
    with naming_file(path, PlanError):
        text = read_text(path)
        if text[:1] == "{":  # most plans are large
            return _Proven(from_json(text))
        is_table, from_table, launches_of = map(resolve_name, _READERS)
        if is_table(path, text):
            return _Proven(from_table(text), launches_of(text), is_table=True)
        if text.strip() and text.lstrip()[0] not in "{[" and not path.endswith(".json"):
            raise PlanError(
                "neither a plan, which is JSON, nor a table: no line is a row of rank 0, such as `f0 b0`, `F0.1 BW0.1` or "
                "`Rank 0: (F|0|0)`, and a table with a row of cells such as 0F0,0B0 for each rank is a .csv"
            )
        return _Proven(from_json(text))


def _load_sound(path: str) -> Plan:
    """Load a plan. Refuse one that deadlocks or contradicts itself in tables, chunks and actions; warn of other violations."""
    plan = load(path)
    if fault := next(_contradictions(plan), None):
        raise PlanError(f"{path}: {fault}; see: {PROGRAM} check {path}")
    if violations := check(plan):
        with naming_file(path, PlanError):
            simulate(plan)
        tell(f"{PROGRAM}: warning: {len(violations)} violation(s), see: {PROGRAM} check {path}")
    return plan


def _contradictions(plan: Plan) -> Iterator[Violation]:
    columns = columns_of(plan)
    yield from check_tables(plan, columns)
    yield from check_tokens(plan)
    yield from check_presence(plan, columns, listed(plan, columns))
    yield from check_kv_offload(plan)
