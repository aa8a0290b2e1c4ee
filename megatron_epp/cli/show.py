"""The command that shows a plan, and runs of it, as text, page, picture or trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_epp.cli.plan import add_width, load_sound, text_of
from megatron_epp.cli.terminal import PAGE, PICTURES, Command, Parser, add_output, is_page, output, picture, progress, say
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.reading import naming
from megatron_epp.plan.text import to_grid
from megatron_epp.plan.writing import write_text
from megatron_epp.report.gantt import save_gantt
from megatron_epp.report.measured import Measured, measured_boxes
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.text import against
from megatron_epp.report.trace import save_trace

_EXAMPLE = """\
example: a page with zoom, memory, and what every idle rank waits for; it opens in any browser, without a network
  megatron-epp show plan.json -o plan.html
an iteration of a training with --epp-report-dir runs/tiny --epp-trace 3, as planned and as measured
  megatron-epp show runs/tiny -o iteration.html
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "plans",
        metavar="PLAN.json",
        nargs="+",
        help="what `megatron-epp plan -o` or a training run wrote; or the folder of a run with --epp-trace (--epp-report-dir); "
        "several for a page that compares them",
    )
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="a run of this plan, as the training run wrote it, to draw next to it (default: none; of a folder, its own)",
    )
    add_output(
        parser,
        "the suffix decides: .html for a page to explore, .png, .svg or .pdf for a Gantt picture, .json for a trace (open it "
        "in ui.perfetto.dev), .txt for text. Without it: text on the screen",
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
    add_width(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, or write what the flags name. Raises `EppError`."""
    shown = _shown(args)
    outputs = [path for path in (args.output, args.png, args.trace) if path]
    if len(shown) > 1 and not (outputs and all(map(is_page, outputs))):
        names = ", ".join(one.name for one in shown)
        raise EppError(f"there are several plans ({names}): name one, or write a page of all with -o page{PAGE}")
    first = shown[0]
    if args.lowered:
        say(to_grid(lower(first.plan)).rstrip())
    if not outputs and not args.lowered:
        say(_text(first, args))
    with progress("drawing"):
        for path in outputs:
            _write(path, shown, args)
    return 0


def _write(path: str, shown: list[Shown], args: argparse.Namespace) -> None:
    """Write plans to a file whose suffix selects the format, all of them to a page and else the first."""
    first, suffix = shown[0], Path(path).suffix.lower()
    if path is args.trace or suffix == ".json":
        save_trace(first.plan, path, first.measured)
    elif is_page(path):
        save_page(shown, path)
    elif suffix in PICTURES:
        save_gantt(first.plan, path, first.measured)
    elif suffix == ".txt":
        write_text(path, _text(first, args) + "\n")
    else:
        raise EppError(f"--output {path}: unknown suffix {suffix!r}; use {', '.join((PAGE, *PICTURES))}, .json or .txt")


def _text(shown: Shown, args: argparse.Namespace) -> str:
    text = text_of(shown.plan, args)
    return text if shown.measured is None else f"{text}\n\n{against(shown.plan, shown.measured)}"


def _shown(args: argparse.Namespace) -> list[Shown]:
    """Load the plans and the run that the flags name, and those of all traced iterations of folders."""
    if args.measured and (len(args.plans) > 1 or Path(args.plans[0]).is_dir()):
        raise EppError(f"--measured {args.measured} is a run of one plan: name that plan alone, and no folder")
    found: list[Shown] = []
    for path in map(Path, args.plans):
        found += _of_folder(path) if path.is_dir() else [_load(path, Path(args.measured) if args.measured else None)]
    return found


def _of_folder(path: Path) -> list[Shown]:
    """Load the plans and runs of all traced iterations of a training."""
    plans = sorted(path.glob("plan*.json"), key=lambda one: (len(one.name), one.name))
    if not plans:
        raise PlanError(f"{path} has no plan.json: a training run writes it with --epp-report-dir and --epp-trace ITERATION")
    runs = [path / one.name.replace("plan", "measured", 1) for one in plans]
    return [_load(plan, run if run.exists() else None) for plan, run in zip(plans, runs, strict=True)]


def _load(path: Path, measured_path: Path | None) -> Shown:
    made, measured = load_sound(str(path)), None
    if measured_path is not None:
        measured = Measured.load(measured_path)
        with naming(measured_path, PlanError):
            measured_boxes(made, measured)
    return Shown(path.stem, made, measured)


COMMAND = Command("show", "show a plan, and a run of it, as text, page, picture or trace", add_arguments, run, _EXAMPLE)
